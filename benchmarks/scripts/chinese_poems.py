"""chinese_gpt on Tang poems through its commands: form of what it writes, perplexity beside n-grams and GPT-2 under Trainer.

python -m benchmarks chinese_poems --json docs/results/chinese_poems_cpu.json

`make real` fetches the poems and the dictionary of readings. `truebatch train`, `evaluate` and `generate` are run as they
are typed, on one thread; a GPT-2 of transformers with the same sizes and settings is trained on the same poems by the
Hugging Face Trainer, grouped by length and in random order, for as many CPU seconds. With --hf-seconds, which says how
many, all run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import check_can_keep, keep_result, origin
from benchmarks.systems.poem_forms import count_forms, lines_of
from tests.real.poems import FOLDER, write_poems

READINGS = FOLDER / "pypinyin"
SAMPLED = 200
"""Poems that are written, each from the first line of one that was not trained on."""
MORE = 80
"""New tokens of a poem at most: eight lines of seven characters have 71."""
SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PoemSettings:
    """What is run."""

    steps: int = 6000
    samples_per_step: int = 16
    learning_rate: float = 2e-3
    dropout: float = 0.0
    hf_seconds: float | None = None
    """CPU seconds of the other model; by default those of the whole command that trained ours."""


def settings_of(asked: PoemSettings, data: Path) -> list[str]:
    """What is typed behind `truebatch train chinese_gpt`."""
    given = {
        "data": data, "backend": "character", "dropout": asked.dropout, "train.max_steps": asked.steps,
        "train.batch_size": asked.samples_per_step, "train.learning_rate": asked.learning_rate,
        "train.layout": "packed",
    }  # fmt: skip
    return [word for name, value in given.items() for word in ("--set", f"{name}={value}")]


def run_command(words: Sequence[str]) -> tuple[str, float]:
    """What a command of truebatch printed, and the CPU seconds it took."""
    before = _child_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "truebatch", *words], env=_one_thread(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"truebatch {words[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout, _child_seconds() - before


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_poems(asked: PoemSettings, out: Path | None) -> dict[str, Any]:
    """Train, evaluate and write; then, or at the same time, the other model."""
    data = write_poems()
    result: dict[str, Any] = {"ratios": {}, "rows": [], "forms": []}
    result |= origin(asked, "transformers", command=command_line("benchmarks.scripts.chinese_poems"))
    early = _start_others(asked, asked.hf_seconds) if asked.hf_seconds is not None else None
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        began = time.monotonic()
        _, seconds = run_command(["train", "chinese_gpt", *settings_of(asked, data), "--out", str(run)])
        wall = time.monotonic() - began
        figures = json.loads(run_command(["evaluate", str(run), "--json"])[0].strip().splitlines()[-1])
        result["rows"] += _our_rows(asked, figures, seconds, wall)
        result["forms"], result["poems"] = _written(run, data)
        keep_result(result, out)
        _say_rows(result)
    for other in early or _start_others(asked, seconds):
        said, _ = other.communicate()
        if other.returncode:
            raise RuntimeError(f"the other model ended with {other.returncode}")
        result["rows"].append(json.loads(said.strip().splitlines()[-1]))
    result["ratios"] = ratios_of(result["rows"])
    keep_result(result, out)
    _say_rows(result)
    return result


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Every other way over ours: above 1 ours foresees the poems better, or took less time."""
    ours = rows[0]
    found = {f"perplexity, {row['way']} / ours": row["perplexity"] / ours["perplexity"] for row in rows[1:]}
    timed = [row for row in rows[1:] if "cpu_seconds" in row]
    return found | {f"CPU seconds, {row['way']} / ours": row["cpu_seconds"] / ours["cpu_seconds"] for row in timed}


def _say_rows(result: dict[str, Any]) -> None:
    for row in (*result["rows"], *result["forms"]):
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _our_rows(asked: PoemSettings, found: dict[str, Any], seconds: float, wall: float) -> list[dict[str, Any]]:
    found = found.get("figures", found)
    ours = {"steps": asked.steps, "cpu_seconds": seconds, "wall_seconds": wall}
    return [
        {"way": "truebatch train chinese_gpt", "perplexity": found["perplexity"], **ours},
        {"way": "unigram", "perplexity": found["unigram_perplexity"]},
        {"way": "bigram", "perplexity": found["bigram_perplexity"]},
    ]


def _written(run: Path, data: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The forms of poems that the model writes, of the poems whose first lines it was given, and of dealt line ends."""
    held, known = _held_out(data)
    chosen = held[:SAMPLED]
    prompts = [lines_of(poem)[0] + "，" for poem in chosen]
    file = run.parent / "prompts.json"
    file.write_text(json.dumps(prompts, ensure_ascii=False), encoding="utf-8")
    words = ["generate", str(run), "--prompts", str(file), "--max-new-tokens", str(MORE), "--json"]
    said, _ = run_command(words)
    texts = [prompt + json.loads(line)["text"] for prompt, line in zip(prompts, said.splitlines(), strict=True)]
    dealt = _with_other_ends(chosen)
    seen = {line for poem in known for line in lines_of(poem)}
    forms = [
        {"texts are": name, **count_forms(given, readings), **_copied(given, seen, prompts)}
        for name, given in (
            ("written by the model", texts),
            ("the real poems", chosen),
            ("real, ends dealt anew", dealt),
        )
    ]
    return forms, [text for text in texts if count_forms([text], readings)["rhyming"]][:SHOWN]


def _copied(texts: Sequence[str], seen: set[str], prompts: Sequence[str]) -> dict[str, float]:
    later = [line for text in texts for line in lines_of(text)[1:]]
    lengths = [len(p) - 1 == len(line) for p, t in zip(prompts, texts, strict=True) for line in lines_of(t)[1:]]
    return {
        "lines_of_the_first_length": sum(lengths) / max(len(lengths), 1),
        "lines_of_training_poems": sum(line in seen for line in later) / max(len(later), 1),
    }


def _with_other_ends(poems: Sequence[str]) -> list[str]:
    """The lines of poems with the last characters of all of them dealt anew: what rhymes by chance."""
    ends = [line[-1] for poem in poems for line in lines_of(poem)]
    Random(0).shuffle(ends)
    left = iter(ends)
    return ["，".join(line[:-1] + next(left) for line in lines_of(poem)) for poem in poems]


@cache
def _readings_of() -> Any:
    sys.path.append(str(READINGS))
    from pypinyin import Style, pinyin

    return lambda character: set(pinyin(character, style=Style.NORMAL, heteronym=True)[0])


def readings(character: str) -> set[str]:
    """The syllables of a character, by the dictionary of pypinyin."""
    found: set[str] = _readings_of()(character)
    return found


def _prepared(data: Path) -> Any:
    from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
    from truebatch_systems.chinese_gpt.data.prepare import prepare

    return prepare(ChineseGPTConfig(data=str(data), backend="character", stage="pretraining"))


def _held_out(data: Path) -> tuple[list[str], list[str]]:
    """Poems of the test part in an order of their own, and those of training."""
    from truebatch.planning.keyed_rng import keyed_order

    ready = _prepared(data)
    order = keyed_order(len(ready.test), 0, 0, "poems").tolist()
    return [ready.test.texts[i].text for i in order], [text.text for text in ready.train.texts]


def _start_others(asked: PoemSettings, seconds: float) -> list[subprocess.Popen[str]]:
    """Both orders of rows, at the same time: each has one thread."""
    words = {"rate": asked.learning_rate, "rows": asked.samples_per_step, "dropout": asked.dropout, "seconds": seconds}
    commands = [
        [sys.executable, "-m", "benchmarks.systems.poem_trainer", json.dumps({**words, "grouped": grouped})]
        for grouped in (True, False)
    ]
    return [subprocess.Popen(line, env=_one_thread(), stdout=subprocess.PIPE, text=True) for line in commands]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(PoemSettings()).items():
        kind = float if value is None else type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value)
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    args = vars(parser.parse_args())
    out = args.pop("out")
    check_can_keep(out)
    run_poems(PoemSettings(**args), out)


if __name__ == "__main__":
    main()
