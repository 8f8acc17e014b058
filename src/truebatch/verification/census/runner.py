"""The census of Hugging Face architectures: is any of them wrong in a layout that truebatch calls right?

tasks -> a process an architecture -> rows, kept in a journal as they come -> summary, Markdown, JSON

`truebatch census` runs it; so does `python -m truebatch.verification.census.runner`, which needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from truebatch.environment import describe_environment
from truebatch.errors import ConfigError, TruebatchError
from truebatch.io.atomic_files import write_text
from truebatch.language.console import say_error
from truebatch.testing.tiny_hf.model import tiny_types
from truebatch.verification.census.journal import append_row, journal_key, read_journal
from truebatch.verification.census.media import MEDIA_HEADS
from truebatch.verification.census.popular import most_used
from truebatch.verification.census.processes import Ended, Workers, run_each
from truebatch.verification.census.progress import progress
from truebatch.verification.census.tables import markdown, summary_lines, wrong_rows
from truebatch.verification.census.worker import CensusTask, examine

HEADS = ("causal_lm", "masked_lm", "seq2seq", "vision_language", *MEDIA_HEADS)
JOURNAL = Path("runs/census/rows.jsonl")
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
"""What workers see: one thread each, no network, no advice."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CensusConfig:
    """What is counted, and how."""

    heads: tuple[str, ...] = HEADS
    only: tuple[str, ...] = ()
    """Only these architectures; all if empty."""
    top: int = 0
    """Only so many of the most used ones, each in the layout that is used; 0: all, in every layout."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    jobs: int = 2
    time_limit_s: float = 300.0
    """An architecture that takes longer is killed and counted as such."""
    journal: Path = JOURNAL
    """Finished rows; a census that was interrupted goes on from there."""
    fresh: bool = False
    """Forget finished rows."""

    def __post_init__(self) -> None:
        _check_choice("device", self.device, ("cpu", "cuda"))
        _check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        for head in self.heads:
            _check_choice("head", head, (*HEADS, "all"))
        if self.top < 0 or (self.top and self.only):
            raise ConfigError(
                "a census of the most used architectures needs their number, and no names",
                seen=f"top={self.top}, only={list(self.only)}",
                do="use --top 200 for the quick check, or --only llama,qwen2 for single ones",
            )
        if self.jobs < 1 or not self.time_limit_s > 0:
            raise ConfigError(
                "a census needs at least one job and some time",
                seen=f"jobs={self.jobs}, time limit {self.time_limit_s} s",
                do="use --jobs 2 --time-limit 300",
            )


@dataclass(frozen=True, slots=True)
class Census:
    """All rows, and where they come from."""

    facts: dict[str, Any]
    """Versions, hardware, date, command."""
    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """1 if any row is wrong and was not noticed."""
        return 1 if wrong_rows(self.rows) else 0


def run_census(config: CensusConfig, *, work: Callable[[CensusTask], Row] = examine) -> Census:
    """Examine every architecture asked for; rows already in the journal are not made again."""
    tasks = census_tasks(config)
    key = journal_key(config.device, config.dtype, quick=bool(config.top))
    if config.fresh:
        config.journal.unlink(missing_ok=True)
    known = read_journal(config.journal, key)
    missing = [task for task in tasks if _name(task) not in known]
    with _environment(WORKER_ENVIRONMENT), progress(len(missing), "examining architectures") as tell:
        for ended in run_each(missing, work, _workers(config)):
            row = _row(ended)
            known[_name(ended.task)] = row
            append_row(config.journal, key, row)
            tell(f"{row['head']} {row['model_type']}: {row['verdict']} {row['why']}".strip())
    return Census(_facts(config, key), [known[_name(task)] for task in tasks])


def census_tasks(config: CensusConfig) -> list[CensusTask]:
    """One for each architecture and head that transformers has and the user asked for."""
    heads = HEADS if "all" in config.heads else config.heads
    named = {head: tiny_types(head) for head in heads}
    unknown = set(config.only) - {name for names in named.values() for name in names}
    if unknown:
        raise ConfigError(
            f"unknown architectures: {sorted(unknown)}",
            seen=f"heads {list(heads)}, transformers {metadata.version('transformers')}",
            do="name architectures as their `model_type`, such as llama,qwen2",
        )
    every = [(head, name) for head, names in named.items() for name in names]
    asked = most_used(config.top, named) if config.top else every
    return [
        CensusTask(model_type=name, head=head, device=config.device, dtype=config.dtype, is_quick=bool(config.top))
        for head, name in asked
        if not config.only or name in config.only
    ]


def write_results(census: Census, *, json_file: Path | None, markdown_file: Path | None) -> None:
    """The rows as JSON and as Markdown, each only if asked for."""
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        # One line a row: a change of one architecture is a change of one line.
        lines = ",\n".join(json.dumps(row) for row in census.rows)
        facts = json.dumps(census.facts, indent=2)
        write_text(json_file, f'{{"facts": {facts},\n"rows": [\n{lines}\n]}}\n')
    if markdown_file is not None:
        markdown_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(markdown_file, markdown(census.facts, census.rows))


def _name(task: CensusTask) -> tuple[str, str]:
    return task.head, task.model_type


def _row(ended: Ended) -> Row:
    if not ended.problem:
        row: Row = ended.result
        return row
    verdict = "killed" if ended.problem.startswith("killed") else "crashed"
    task: CensusTask = ended.task
    seconds = round(ended.seconds, 2)
    return {
        "model_type": task.model_type,
        "head": task.head,
        "verdict": verdict,
        "why": ended.problem,
        "seconds": seconds,
    }


def _workers(config: CensusConfig) -> Workers:
    # CUDA cannot be used in a copy of a process, and starting it takes seconds: there, workers serve many tasks.
    on_cuda = config.device == "cuda"
    return Workers(
        jobs=config.jobs,
        time_limit_s=config.time_limit_s,
        method="spawn" if on_cuda else "forkserver",
        one_task_each=not on_cuda,
        preload=("truebatch.verification.census.worker",),
    )


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _facts(config: CensusConfig, key: dict[str, str]) -> dict[str, Any]:
    machine = describe_environment()
    hardware = machine["accelerator"] if config.device == "cuda" else f"{machine['cpus']} CPU cores"
    options = [f"--head {head}" for head in config.heads if head != "all" and config.heads != HEADS]
    options += [f"--only {','.join(config.only)}"] if config.only else []
    options += [f"--top {config.top}"] if config.top else []
    options += [f"--device {config.device}"] if config.device != "cpu" else []
    options += [f"--dtype {config.dtype}"] if config.dtype != "float32" else []
    return {
        "command": " ".join(["truebatch census", *options]),
        "date": datetime.now(UTC).date().isoformat(),
        "python": machine["python"],
        "hardware": hardware,
        **key,
    }


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"unknown {name}", seen=f"{name}={value!r}", do=f"use one of {', '.join(allowed)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m truebatch.verification.census.runner`: the same census where the command line's packages are missing."""
    parser = argparse.ArgumentParser(prog="python -m truebatch.verification.census.runner")
    parser.add_argument("--head", action="append", help=", ".join((*HEADS, "all")))
    parser.add_argument("--only", default="")
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=300.0)
    parser.add_argument("--journal", type=Path, default=JOURNAL)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args(arguments)
    try:
        config = CensusConfig(
            heads=tuple(asked.head or HEADS), only=split_names(asked.only), top=asked.top, device=asked.device,
            dtype=asked.dtype, jobs=asked.jobs, time_limit_s=asked.time_limit, journal=asked.journal, fresh=asked.fresh,
        )  # fmt: skip
        return finish(run_census(config), json_file=asked.json, markdown_file=asked.markdown)
    except TruebatchError as error:
        say_error(error.wrong, error.seen, error.do)
        return 2


def split_names(text: str) -> tuple[str, ...]:
    """`llama,qwen2` as names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def finish(census: Census, *, json_file: Path | None, markdown_file: Path | None) -> int:
    """Write what was asked for, print the summary, and give the exit code."""
    write_results(census, json_file=json_file, markdown_file=markdown_file)
    sys.stdout.write("\n".join(summary_lines(census.facts, census.rows)) + "\n")
    return census.exit_code


if __name__ == "__main__":
    sys.exit(main())
