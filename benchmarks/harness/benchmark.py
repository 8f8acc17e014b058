"""A benchmark as one value, and how it is run: cases x methods -> rows -> JSON, written again after every row.

    python -m benchmarks NAME --json FILE

options -> cases -> for each case every round of every method, in turns -> rows -> summary, ratios first. A run that was
stopped leaves its rows in the file; the same command measures only what is not there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.harness.choices import read_names
from benchmarks.harness.result_file import check_can_keep, keep_result, origin
from truebatch.errors import ConfigError

Row = dict[str, Any]
UNFINISHED = "unfinished"
"""In a result whose run was stopped, or is still running."""
MAY_DIFFER = ("command", "date")
"""What may be another where a run goes on. Hardware, versions and options may not: rows of two kinds would share a table."""


def option(default: Any, about: str) -> Any:
    """A field of a benchmark's options, with its line in `--help`; a field without one is no option."""
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """For a benchmark that has no options of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """What is measured, on what, and in which ways; `measure` takes one case in one way and gives one row."""

    name: str
    about: str
    """What `--help` says above the options."""
    cases: Callable[[Any], Sequence[str]]
    methods: Callable[[Any], Sequence[str]]
    measure: Callable[[Any, str], Row | None]
    """The figures of one method, on what `prepare` made of a case; None where the method is not for it."""
    prepare: Callable[[Any, str], Any] = lambda options, case: (options, case)
    """What the methods of a case share, made once; by default the options and the case."""
    options: type = Options
    rounds: Callable[[Any], int] = lambda options: 1
    """How often every method of a case is measured; the methods take turns, so that none has the quiet minutes."""
    best_of: str = ""
    """The figure whose smallest value decides which of the rounds is kept."""
    summary: Callable[[Sequence[Row]], Mapping[str, Any]] = lambda rows: {}
    """What the result says above its rows, ratios first."""
    problems: Callable[[Mapping[str, Any]], Sequence[str]] = lambda result: ()
    """Limits that the result misses, each as a line; with one the exit code is 1."""
    libraries: tuple[str, ...] = ()
    """Packages whose versions stand in the result."""


def run_benchmark(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    """Measure what the command line asks for, print every row and keep it; 1 where a limit is missed."""
    asked = make_parser(benchmark).parse_args(list(arguments))
    options = benchmark.options(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in _given(benchmark, asked)}
    )
    cases = _chosen(asked.only, benchmark.cases(options), "case")
    methods = _chosen(asked.methods, benchmark.methods(options), "method")
    check_can_keep(asked.json)
    about = origin(options, *benchmark.libraries, command=_command(benchmark.name, arguments))
    rows = [] if asked.fresh else _rows_left(asked.json, about)
    for case in cases:
        missing = [method for method in methods if not _holds(rows, case, method)]
        for row in _measured(benchmark, options, case, missing):
            rows.append(row)
            print(_line(row), flush=True)
            keep_result(_result(benchmark, rows, about) | {UNFINISHED: True}, asked.json)
    result = _result(benchmark, rows, about)
    result["problems"] = list(benchmark.problems(result))
    keep_result({key: value for key, value in result.items() if value or key != "problems"}, asked.json)
    print(*(f"{name}: {_text(value)}" for name, value in benchmark.summary(rows).items()), sep="\n")
    print(*(f"missed: {line}" for line in result["problems"]), sep="\n", file=sys.stderr)
    return 1 if result["problems"] else 0


def make_parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    """The command line: the options of the benchmark, and those that all have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {benchmark.name}", description=benchmark.about, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    types = get_type_hints(benchmark.options)
    for one in _asked_for(benchmark):
        is_many = isinstance(one.default, tuple)
        shown = " ".join(map(str, one.default)) if is_many else one.default
        parser.add_argument(
            f"--{one.name.replace('_', '-')}", type=type(one.default[0]) if is_many else types[one.name],
            nargs="+" if is_many else None, default=one.default, help=f"{one.metadata['help']} Default: {shown}.",
        )  # fmt: skip
    parser.add_argument("--only", default="", metavar="CASES", help="Only these cases; several with commas.")
    parser.add_argument("--methods", default="", help="Only these methods; several with commas.")
    parser.add_argument("--fresh", action="store_true", help="Measure everything anew, whatever the file holds.")
    parser.add_argument("--json", "--out", type=_file, metavar="FILE", help="Keep the rows here as JSON.")
    return parser


def _command(name: str, arguments: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "benchmarks", name, *(word for word in arguments if word != "--fresh")])


def _asked_for(benchmark: Benchmark) -> list[Any]:
    return [one for one in fields(benchmark.options) if "help" in one.metadata]


def _given(benchmark: Benchmark, asked: argparse.Namespace) -> list[tuple[str, Any]]:
    return [(one.name, getattr(asked, one.name)) for one in _asked_for(benchmark)]


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    return path


def _chosen(text: str, known: Sequence[str], kind: str) -> Sequence[str]:
    return read_names(text, known, kind=kind) if text else known


def _rows_left(file: Path | None, about: Mapping[str, Any]) -> list[Row]:
    """The rows of a run that was stopped; those of another machine or of other options are refused."""
    text = file.read_text(encoding="utf-8") if file is not None and file.exists() else ""
    kept = json.loads(text) if text else {}
    if not kept.get(UNFINISHED):
        return []
    now = json.loads(json.dumps(about))
    for name in now:
        if name not in MAY_DIFFER and kept.get(name) != now[name]:
            raise ConfigError(
                f"the run in {file} was stopped, and began with another {name}",
                seen=f"{kept.get(name)}, now {now[name]}",
                do="repeat its command to go on with it, or measure anew with --fresh",
            )
    print(f"going on: {len(kept['rows'])} rows are there", flush=True)
    return list(kept["rows"])


def _holds(rows: Sequence[Row], case: str, method: str) -> bool:
    return any((row["case"], row["method"]) == (case, method) for row in rows)


def _measured(benchmark: Benchmark, options: Any, case: str, methods: Sequence[str]) -> Iterator[Row]:
    """One row for each method, as soon as its last round is over: the best of its rounds."""
    if not methods:
        return
    prepared, found = benchmark.prepare(options, case), defaultdict(list)
    rounds = benchmark.rounds(options)
    for left in reversed(range(rounds)):
        for method in methods:
            figures = benchmark.measure(prepared, method)
            if figures is None:
                continue
            found[method].append({"case": case, "method": method, **figures})
            if left == 0:
                yield (
                    min(found[method], key=lambda row: row[benchmark.best_of])
                    if benchmark.best_of
                    else found[method][-1]
                )


def _result(benchmark: Benchmark, rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    return {**benchmark.summary(rows), "rows": list(rows), **about}


def _line(row: Mapping[str, Any]) -> str:
    return "  ".join([f"{row['case']}, {row['method']}:"] + [
        f"{name} {_text(value)}" for name, value in row.items() if name not in ("case", "method")
    ])  # fmt: skip


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
