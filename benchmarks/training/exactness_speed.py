"""`exactness: bits` on a GPU: the same bits with 1, 4 and 16 atoms resident, shuffled, and where memory really runs out;
and its speed beside `rounding`, eager and compiled.

Every method is a process of its own on the same samples and weights. In the cases "same bits" a step has about 16 atoms, and
digests of all parameters are compared every ten steps, losses in every step. In the cases "speed" a row of `rounding` is as
wide as an atom, so that both run the same kernels, and tokens per second are the median of the steps. Nothing begins after
`--seconds`; the summary says what was not reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Row, option
from benchmarks.training.exactness_child import ChildRun

ONE, FOUR, SHUFFLED, NO_ROOM = "1 atom resident", "4 atoms resident", "16 atoms resident, shuffled", "out of memory"
BITS, ROUNDING, AGAIN = "bits", "rounding", "rounding again"
LEAST_SPEED = 0.9
ROWS = 11
"""Of all cases."""
BEGAN = time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactnessSpeedOptions:
    """How much is run."""

    device: str = option("cuda", "cuda (1.1B parameters, bf16) or cpu (a dry run with a tiny model).")
    steps: int = option(50, "Of the cases of bits.")
    samples_per_step: int = option(84, "Of the cases of bits.")
    atom_cells: int = option(1536, "Of the cases of bits.")
    speed_steps: int = option(9, "Of the cases of speed; the first three do not count.")
    speed_samples: int = option(448, "Per step, of the cases of speed.")
    speed_cells: int = option(8192, "Of an atom or a row, of the cases of speed.")
    seconds: float = option(520.0, "Nothing begins after this time.")


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """A case, and the folder in which its processes keep what they compile."""

    options: ExactnessSpeedOptions
    is_speed: bool
    is_compiled: bool
    cache: Path


def cases(options: ExactnessSpeedOptions) -> Sequence[str]:
    """What says most first: time may run out."""
    del options
    return ["same bits, eager", "speed, eager", "speed, compiled", "same bits, compiled"]


def prepare(options: ExactnessSpeedOptions, name: str) -> PreparedCase:
    """The folder of what is compiled is one for all cases."""
    cache = Path(tempfile.gettempdir()) / f"exactness-speed-{os.getpid()}"
    return PreparedCase(options, name.startswith("speed"), name.endswith("compiled"), cache)


def measure(prepared: PreparedCase, method: str) -> Row | None:
    """One process; None where the method is not of this case, or the time is over."""
    is_of_case = method in ((BITS, ROUNDING, AGAIN) if prepared.is_speed else (ONE, FOUR, SHUFFLED, NO_ROOM))
    is_left_out = method in (FOUR, NO_ROOM) if prepared.is_compiled else method == AGAIN
    if not is_of_case or is_left_out or time.monotonic() - BEGAN > prepared.options.seconds:
        return None
    run = _speed_run(prepared, method) if prepared.is_speed else _bits_run(prepared, method)
    return _run(run, prepared.cache)


def _bits_run(prepared: PreparedCase, method: str) -> ChildRun:
    options = prepared.options
    resident = {ONE: 1, FOUR: 4, SHUFFLED: 16, NO_ROOM: 4}[method]
    settings = {
        "exactness": "bits", "atom_cells": options.atom_cells, "cells": resident * options.atom_cells,
        "compile": prepared.is_compiled, "digest_every": 10, "check_samples": 0,
    }  # fmt: skip
    short = tuple(step for step in (10, 45) if step < options.steps) if method == NO_ROOM else ()
    return ChildRun(
        shape=_shape(options), device=options.device, steps=options.steps, samples_per_step=options.samples_per_step,
        longest=options.atom_cells, settings=settings, order="shuffled:7" if method == SHUFFLED else "",
        short_of_memory=short,
    )  # fmt: skip


def _speed_run(prepared: PreparedCase, method: str) -> ChildRun:
    options = prepared.options
    exact = (
        {"exactness": "bits", "atom_cells": options.speed_cells} if method == BITS else {"cells": options.speed_cells}
    )
    settings = {**exact, "compile": prepared.is_compiled, "check_samples": 0}
    return ChildRun(
        shape=_shape(options), device=options.device, steps=options.speed_steps, samples_per_step=options.speed_samples,
        longest=min(options.speed_cells, 4096), settings=settings,
    )  # fmt: skip


def _shape(options: ExactnessSpeedOptions) -> str:
    return "llama-1.1b" if options.device == "cuda" else "llama-tiny"


def _run(run: ChildRun, cache: Path) -> Row:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([str(Path(root, "src")), root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "benchmarks.training.exactness_child", json.dumps(asdict(run))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {"failed": done.stderr.splitlines()[-12:]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Shares of the speed of `rounding`, and how many runs have the same digests and losses."""
    speed = {(row["case"], row["method"]): row.get("tokens_per_second", 0.0) for row in rows}
    shares = {
        case: speed[case, BITS] / speed[case, ROUNDING]
        for case, method in speed
        if method == BITS and speed.get((case, ROUNDING))
    }
    found: dict[str, Any] = {"share of the speed of rounding": shares} if shares else {}
    for case in dict.fromkeys(row["case"] for row in rows if row["case"].startswith("same bits")):
        of_case = [row for row in rows if row["case"] == case]
        ends = {(json.dumps(row.get("digests")), json.dumps(row.get("losses"))) for row in of_case}
        found[f"{case}: runs"] = len(of_case)
        found[f"{case}: different results"] = len(ends)
    losses = [row.get("losses") for row in rows if row["method"] in (ROUNDING, AGAIN) and "compiled" in row["case"]]
    if len(losses) == 2:
        found["compiled rounding, the same command twice: the same losses"] = losses[0] == losses[1]
    return found


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """Results that differ, a speed that is too low, memory that did not run out, and what was not reached."""
    rows = result["rows"]
    lines = [f"{row['case']}, {row['method']}: it failed" for row in rows if "failed" in row]
    lines += [
        f"{name}: {number}, not 1"
        for name, number in result.items()
        if name.endswith("different results") and number != 1
    ]
    shares = result.get("share of the speed of rounding", {})
    lines += [
        f"{case}: {share:.2f} of rounding, not {LEAST_SPEED}" for case, share in shares.items() if share < LEAST_SPEED
    ]
    lines += [
        f"{row['case']}: memory never ran out"
        for row in rows
        if row["method"] == NO_ROOM and not row.get("memory ran out")
    ]
    if result.get("compiled rounding, the same command twice: the same losses") is False:
        lines.append("compiled rounding: the same command twice gives other losses")
    lines += [f"not reached: {number} of {ROWS} rows" for number in [ROWS - len(rows)] if number]
    return lines


BENCHMARK = Benchmark(
    name="exactness_speed",
    about=__doc__,
    options=ExactnessSpeedOptions,
    cases=cases,
    methods=lambda options: [ONE, SHUFFLED, NO_ROOM, FOUR, ROUNDING, BITS, AGAIN],
    prepare=prepare,
    measure=measure,
    summary=summarize,
    problems=find_problems,
    libraries=("torch", "transformers"),
)
