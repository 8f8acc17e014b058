"""What a sample costs around a model: `truebatch score` over very many samples of the scripted judge, CPU time and memory.

Beside it a bare loop that keeps no promise: it parses the lines, asks the same judge and writes the scores into a file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Row, option
from benchmarks.harness.process import run_measured

_BARE = """
import json, sys
from truebatch.scoring.backends.interface import ScoreRequest
from truebatch.scoring.backends.scripted import ScriptedBackend
judge, some = ScriptedBackend().judge, []
with open(sys.argv[1]) as lines, open(sys.argv[2], "w") as out:
    def answer():
        for one, found in zip(some, judge(some)):
            out.write(json.dumps({"id": one.id, "score": found.score, "output": found.output}) + "\\n")
        some.clear()
    for line in lines:
        some.append(ScoreRequest(**json.loads(line)))
        if len(some) == 160:
            answer()
    if some:
        answer()
"""


SCORE = [
    sys.executable,
    "-m",
    "truebatch",
    "score",
    "{data}",
    "--model",
    "scripted",
    "--yesno",
    "--out",
    "{folder}/run",
]
COMMANDS = {"a bare loop": [sys.executable, "-c", _BARE, "{data}", "{folder}/bare.jsonl"], "truebatch score": SCORE}


@dataclass(frozen=True, kw_only=True, slots=True)
class CostOptions:
    """How many samples."""

    samples: tuple[int, ...] = option((100_000, 1_000_000), "How many; twice, to see memory stay flat.")


def write_samples(path: Path, number: int) -> None:
    """Different samples of 18 to 84 letters, each with an id."""
    with path.open("w") as file:
        for at in range(number):
            file.write(json.dumps({"id": f"s{at}", "user": f"sample number {at} " + "x" * (at * 7919 % 60)}) + "\n")


def measure(prepared: tuple[CostOptions, str], method: str) -> Row:
    """One method over so many samples, from the first line of the process to its last."""
    number = int(prepared[1].split()[0].replace(",", ""))
    with tempfile.TemporaryDirectory() as place:
        data = Path(place, "samples.jsonl")
        write_samples(data, number)
        found = run_measured(
            [word.replace("{data}", str(data)).replace("{folder}", place) for word in COMMANDS[method]]
        )
    return {"samples": number, "cpu_us_a_sample": found["cpu_seconds"] / number * 1e6, **found}


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """CPU time of the command over that of the bare loop."""
    cost = {(row["case"], row["method"]): row["cpu_us_a_sample"] for row in rows}
    both = [case for case, method in cost if method == "truebatch score" and (case, "a bare loop") in cost]
    return (
        {"ratios": {case: cost[case, "truebatch score"] / cost[case, "a bare loop"] for case in both}} if both else {}
    )


BENCHMARK = Benchmark(
    name="scoring_cost",
    about=__doc__,
    options=CostOptions,
    cases=lambda options: [f"{number:,} samples" for number in options.samples],
    methods=lambda options: list(COMMANDS),
    measure=measure,
    summary=summarize,
)
