"""`exactness: bits`, tried: the digests of all parameters after every step, under one cut after another.

Small models are trained for 100 steps in one process, one atom at a time; then with 4 and 16 atoms resident, with the atoms of
every step in another order, over 2, 3 and 4 processes, with 50 injected out-of-memory errors, and killed 20 times, each time
resumed by another number of processes. A row says in how many steps digest and loss are those of the first run.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.benchmark import Benchmark, Row, option
from benchmarks.training.exactness_cases import CASES, ExactnessCase
from benchmarks.training.exactness_ranks import Fault, Start, recoveries, run_ranks, steps_of

FIRST = "1 process, 1 atom resident"
NO_MEMORY, KILLS = "2 processes, out of memory", "killed, resumed by other numbers"
STARTS = {
    FIRST: Start(),
    "4 atoms resident": Start(resident=4),
    "16 atoms resident": Start(resident=16),
    "shuffled order": Start(resident=4, order="shuffled:1"),
    "2 processes": Start(world=2),
    "3 processes, 4 resident": Start(world=3, resident=4),
    "4 processes, shuffled": Start(world=4, resident=16, order="shuffled:2"),
}
IN_STEP = ("step.transfer", "step.forward", "step.backward")
ANYWHERE = (*IN_STEP, "step.accumulated", "step.optimiser", "step.loading")
ON_RANK_0 = ("checkpoint.file_begun", "checkpoint.after_manifest", "metrics.half_written", "prune.renamed")
WORLDS = (1, 2, 3, 4, 2, 1, 3, 2, 4, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactnessOptions:
    """How much goes wrong."""

    steps: int = option(100, "Of every run.")
    errors: int = option(50, "Injected out-of-memory errors.")
    kills: int = option(20, "Of processes.")


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """A case, and the steps of its first run."""

    options: ExactnessOptions
    case: ExactnessCase
    folder: Path
    first: list[tuple[int, str, float]] = field(default_factory=list)


def prepare(options: ExactnessOptions, name: str) -> PreparedCase:
    """Samples are read once; the first run is made once, for all others are compared with it."""
    prepared = PreparedCase(options, CASES[name](), Path(tempfile.mkdtemp(prefix="exactness-")))
    codes = run_ranks(prepared.case, Start(steps=options.steps), prepared.folder / "first")
    assert codes == [0], codes
    prepared.first.extend(steps_of(prepared.folder / "first"))
    return prepared


def measure(prepared: PreparedCase, method: str) -> Row:
    """One run under another cut, and how many of its steps are those of the first."""
    began, folder = time.perf_counter(), prepared.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    more: dict[str, Any] = {}
    if method == KILLS:
        more = _killed(prepared, folder)
    elif method == NO_MEMORY:
        more = _without_memory(prepared, folder)
    else:
        start = STARTS[method]
        _done(
            prepared,
            Start(world=start.world, resident=start.resident, order=start.order, steps=_steps(prepared)),
            folder,
        )
    found = steps_of(folder)
    equal = sum(one == other for one, other in zip(found, prepared.first, strict=False))
    return {
        "steps": len(found), "equal": equal, "last digest": found[-1][1] if found else "", **more,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def _steps(prepared: PreparedCase) -> int:
    return prepared.options.steps


def _done(prepared: PreparedCase, start: Start, folder: Path) -> None:
    codes = run_ranks(prepared.case, start, folder)
    if any(codes):
        raise RuntimeError(f"a run was to end well: {start}, exit codes {codes}")


def _without_memory(prepared: PreparedCase, folder: Path) -> dict[str, Any]:
    """Errors in as many steps, on either rank, where an atom begins, is run, or has its loss; not in the first step."""
    draw, steps = np.random.default_rng(1), _steps(prepared)
    number = prepared.options.errors + -(
        -prepared.options.errors // 10
    )  # a rank without an atom in its step meets none
    chosen = 1 + np.sort(draw.permutation(steps - 1)[:number])
    faults = tuple(
        Fault(int(step), int(draw.integers(2)), f"{IN_STEP[int(draw.integers(3))]}:oom:1") for step in chosen
    )
    _done(prepared, Start(world=2, resident=4, steps=steps, faults=faults), folder)
    return {"errors": len(faults), "run again": recoveries(folder)}


def _killed(prepared: PreparedCase, folder: Path) -> dict[str, Any]:
    """Killed at places drawn by chance, about evenly over the run; every start has another number of processes."""
    draw, steps, kills = np.random.default_rng(2), _steps(prepared), prepared.options.kills
    seen, worlds = 0, list[int]()
    for at in range(kills):
        world = WORLDS[at % len(WORLDS)]
        places = (*ANYWHERE, *ON_RANK_0)
        place = places[int(draw.integers(len(places)))]
        rank = 0 if place in ON_RANK_0 else int(draw.integers(world))
        fault = Fault((at + 1) * steps // (kills + 1), rank, f"{place}:kill:1")
        start = Start(
            world=world, resident=(1, 4, 16)[at % 3], order=("", "shuffled:3")[at % 2], steps=steps, save_every=2,
            faults=(fault,),
        )  # fmt: skip
        codes = run_ranks(prepared.case, start, folder)
        seen += codes[rank] == -9
        worlds.append(world)
    last = WORLDS[kills % len(WORLDS)]
    _done(prepared, Start(world=last, steps=steps, save_every=2), folder)
    return {"kills": seen, "processes": " ".join(map(str, [*worlds, last]))}


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Of each case: runs, and in how many of them all steps are those of the first run."""
    found: dict[str, Any] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        equal = sum(row["equal"] == row["steps"] for row in of_case)
        found[case] = f"{equal} of {len(of_case)} runs have the same bits in every step"
    return found


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """Runs that differ, and faults that never happened."""
    asked, lines = result["config"], []
    for row in result["rows"]:
        name = f"{row['case']}, {row['method']}"
        if row["equal"] != row["steps"] or row["steps"] != asked["steps"]:
            lines.append(f"{name}: {row['equal']} of {row['steps']} steps are equal, of {asked['steps']}")
        if row["method"] == KILLS and row["kills"] != asked["kills"]:
            lines.append(f"{name}: {row['kills']} kills, not {asked['kills']}")
        if row["method"] == NO_MEMORY and row["run again"] < asked["errors"]:
            lines.append(f"{name}: {row['run again']} errors were met, not {asked['errors']}")
    return lines


BENCHMARK = Benchmark(
    name="exactness",
    about=__doc__,
    options=ExactnessOptions,
    cases=lambda options: list(CASES),
    methods=lambda options: [*STARTS, NO_MEMORY, KILLS],
    prepare=prepare,
    measure=measure,
    summary=summarize,
    problems=find_problems,
    libraries=("torch", "transformers"),
)
