"""The fire drill: a small real run is killed, or finds the disk full, at every failpoint, and must recover on its own.

template run -> for every failpoint: copy, fail there, look, start again -> the end must be bit-equal to the quiet run's
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from truebatch.errors import RunError, TruebatchError
from truebatch.io.atomic_files import read_json, write_json
from truebatch.progress import counted, stage
from truebatch.testing.drills.tiny_run import BEGUN, end_of, run_tiny_training
from truebatch.testing.failpoints import EXIT_CODE, FAILPOINTS, armed, recorded
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.run_dir.run_dir import METRICS

_PROCESS_ENDS = ("kill", "exit")
_REFUSED, _FAULT = 2, 70
_PATIENCE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class DrillTrial:
    """One failure to survive: the nth visit of a failpoint, and what happens there."""

    failpoint: str
    action: str
    nth: int = 1
    keep: int = 1

    @property
    def spec(self) -> str:
        """As `TRUEBATCH_FAILPOINT` has it."""
        return f"{self.failpoint}:{self.action}:{self.nth}"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial went; `problem` is empty when the run recovered."""

    trial: DrillTrial
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DrillFixture:
    """Prepared folders, the visits of a quiet run from each, and how that run ends."""

    folder: Path
    visits: dict[str, dict[str, dict[str, int]]]
    """By beginning, number of checkpoints kept, and failpoint."""
    ends: dict[str, dict[str, Any]]


def run_drill(
    folder: Path,
    *,
    actions: Sequence[str] = ("kill", "enospc"),
    keeps: Sequence[int] = (1, 3),
    every_visit: bool = False,
    on_result: Callable[[TrialResult], None] = print,
) -> tuple[TrialResult, ...]:
    """Fail at every failpoint in every way asked, on the filesystem of `folder` (which is left as it was).

    `keeps` are the numbers of checkpoints the runs keep. With `every_visit` the run fails at each of its visits of a
    failpoint in turn, else at one. Each result is handed to `told` as it comes. Failpoints that the small run never
    visits have no trial.
    """
    ground = make_fixture(folder / "truebatch-drill", keeps=keeps)
    try:
        results = []
        trials = list(list_trials(ground, actions=actions, keeps=keeps, every_visit=every_visit))
        for trial in counted(trials, "failing on purpose and starting again, trials", len(trials)):
            results.append(run_trial(ground, trial))
            on_result(results[-1])
        return tuple(results)
    finally:
        shutil.rmtree(ground.folder, ignore_errors=True)


def list_trials(
    ground: DrillFixture,
    *,
    actions: Sequence[str],
    keeps: Sequence[int],
    every_visit: bool = False,
    names: Sequence[str] | None = None,
) -> Iterator[DrillTrial]:
    """The trials of a drill. Inside a step nothing is written: an error of the disk has no trial there."""
    for name in FAILPOINTS if names is None else names:
        possible = [action for action in actions if action in _PROCESS_ENDS or not name.startswith("step.")]
        for action, keep in itertools.product(possible, keeps):
            visits = num_visits(ground, name, keep)
            # With one checkpoint to keep, the last visit but one: the folder is full then.
            one = [max(1, visits - 1) if keep == 1 else 1] if visits else []
            for nth in range(1, visits + 1) if every_visit else one:
                yield DrillTrial(name, action, nth, keep)


@stage("training the runs that the drill fails")
def make_fixture(folder: Path, *, keeps: Sequence[int] = (1, 3)) -> DrillFixture:
    """Make the two folders every trial begins from: a run to resume, and one to replace by a fresh start."""
    folder.mkdir(parents=True)
    _make_templates(folder)
    visits: dict[str, dict[str, dict[str, int]]] = {}
    ends = {}
    for start in ("go-on", "fresh"):
        visits[start] = {}
        for keep in keeps:
            trial = folder / f"quiet-{start}-{keep}"
            shutil.copytree(folder / start, trial)
            _in_child(_quiet, trial, keep, start == "fresh")
            visits[start][str(keep)] = read_json(trial / "visits.json")
            ends[start] = end_of(trial / "run")
    return DrillFixture(folder, visits, ends)


def num_visits(ground: DrillFixture, name: str, keep: int = 1) -> int:
    """How often a quiet run that keeps so many checkpoints visits a failpoint."""
    return ground.visits[_start_for(ground, name)][str(keep)].get(name, 0)


def run_trial(ground: DrillFixture, trial: DrillTrial) -> TrialResult:
    """Fail once, start again, and compare the end with that of the quiet run."""
    start = _start_for(ground, trial.failpoint)
    folder = ground.folder / f"{trial.failpoint}-{trial.action}-{trial.nth}-keep{trial.keep}"
    shutil.copytree(ground.folder / start, folder)
    code = _in_child(_attempt, folder, trial.keep, start == "fresh", trial.spec)
    problem = _check_failure(trial, code) or _check_left(folder, start)
    if not problem:
        code = _in_child(_attempt, folder, trial.keep, False, "")
        problem = f"starting again ended with exit code {code}" if code else ""
    if not problem:
        problem = _compare(end_of(folder / "run"), ground.ends[start])
    if not problem:
        shutil.rmtree(folder)
    return TrialResult(trial, problem)


def _compare(end: dict[str, Any], quiet: dict[str, Any]) -> str:
    other = [name for name in quiet if end[name] != quiet[name]]
    return f"it went on, but ended otherwise than the quiet run: {', '.join(other)}" if other else ""


def _make_templates(folder: Path) -> None:
    """`go-on`: a run at step 2 that was killed in the worst places. `fresh`: a run with another configuration."""
    _in_child(_earlier, folder / "fresh" / "run")
    run = folder / "go-on" / "run"
    code = _in_child(_attempt, folder / "go-on", 1, False, f"step.loading:exit:{BEGUN + 1}")
    assert code == EXIT_CODE, code
    with (run / METRICS).open("ab") as file:
        file.write(b'{"step": 3, "loss": 0.5}\n{"step": 4, "lo')
    checkpoints = run / "checkpoints"
    (checkpoints / f"step-{BEGUN}").rename(checkpoints / f".replaced-{BEGUN}-0")
    (checkpoints / "step-4").mkdir()  # damaged: it is skipped, and replaced when its step is reached again
    (checkpoints / "step-4" / "model.safetensors").write_bytes(b"half")
    (checkpoints / ".stage-4-0").mkdir()
    (checkpoints / ".stage-4-0" / "model.safetensors").write_bytes(b"half")


def _earlier(folder: Path) -> None:
    run_tiny_training(folder, keep=1, earlier=True)


def _quiet(folder: Path, keep: int, fresh: bool) -> None:
    with recorded() as visits:
        _attempt(folder, keep, fresh, "")
    write_json(folder / "visits.json", dict(visits))


def _attempt(folder: Path, keep: int, fresh: bool, spec: str) -> None:
    """What one process does: open the run, go on, note every save that was reported as done."""
    if spec:
        with armed(spec):
            _attempt(folder, keep, fresh, "")
        return
    try:
        run_tiny_training(folder / "run", keep=keep, fresh=fresh, saved=folder / "saved")
    except RunError as error:
        # Killed before the fresh start came to be: the user gives the same command, with --fresh, again.
        if fresh or "configuration" not in error.wrong:
            raise
        _attempt(folder, keep, True, "")


def _start_for(ground: DrillFixture, name: str) -> str:
    return "go-on" if any(name in visits for visits in ground.visits["go-on"].values()) else "fresh"


def _check_failure(trial: DrillTrial, code: int) -> str:
    expected = {"kill": -signal.SIGKILL, "exit": EXIT_CODE}.get(trial.action)
    if expected is not None:
        return "" if code == expected else f"not reached: the run ended with exit code {code}"
    # An error while pruning does not end a run: the save itself holds.
    return (
        "" if code in (0, _REFUSED) else f"{trial.action} ended the run with exit code {code}, without a clear message"
    )


def _check_left(folder: Path, start: str) -> str:
    """After the failure: what was reported as saved is there, and the run can be read."""
    note = folder / "saved"
    saved = [int(line) for line in note.read_text().split()] if note.exists() else []
    try:
        newest = load_newest(folder / "run" / "checkpoints")
    except TruebatchError as error:
        return f"no checkpoint is left: {error.seen}"
    step = newest.checkpoint.step if newest else 0
    least = max(saved, default=BEGUN if start == "go-on" else 0)
    return "" if step >= least else f"step {least} was saved, step {step} is the newest left"


def _in_child(work: Callable[..., None], *arguments: Any) -> int:
    """Run in a process of its own, forked from one that has torch loaded; gives the exit code."""
    process = _context().Process(target=_child, args=(work, arguments))
    process.start()
    process.join(_PATIENCE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    process.close()
    return _FAULT if code is None else code


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # torch loads its compiler in the first optimiser step; loaded beforehand, it is not loaded in every trial.
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    return context


def _child(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is tried is the disk; a GPU takes seconds to start in every child
    try:
        work(*arguments)
    except TruebatchError:
        sys.exit(_REFUSED)
    except Exception:  # any other error is a finding of the drill
        traceback.print_exc()
        sys.exit(_FAULT)
