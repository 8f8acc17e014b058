"""The fire drill: a small real run is killed, or finds the disk full, at every failpoint, and must go on by itself.

template run -> for every failpoint: copy, fail there, look, start again -> the end must be bit-equal to the quiet run's
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from truebatch.errors import RunError, TruebatchError
from truebatch.training.checkpoints import Checkpoint, Loaded, load_newest, save_checkpoint
from truebatch.training.durable import read_json, write_json
from truebatch.training.failpoints import EXIT_CODE, FAILPOINTS, armed, recorded
from truebatch.training.keeping import list_checkpoints, mark_best
from truebatch.training.metrics import open_metrics
from truebatch.training.runs import METRICS, Run, open_run, read_status, write_status
from truebatch.training.states import optimiser_state, random_state, restore_optimiser, restore_random

STEPS, BEGUN, SAVE_EVERY, BEST = 6, 2, 2, 4
CONFIG = {"drill": {"steps": STEPS, "learning_rate": 0.1}}
_EARLIER = {"drill": {"steps": STEPS, "learning_rate": 0.2}}
_REFUSED, _FAULT = 2, 70
_PATIENCE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Trial:
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

    trial: Trial
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Ground:
    """Prepared folders, the visits of a quiet run from each, and how that run ends."""

    folder: Path
    visits: dict[str, dict[str, int]]
    ends: dict[str, dict[str, Any]]


def run_drill(
    folder: Path,
    *,
    actions: Sequence[str] = ("kill", "enospc"),
    keeps: Sequence[int] = (1, 3),
    told: Callable[[TrialResult], None] = print,
) -> tuple[TrialResult, ...]:
    """Fail at every failpoint in every way asked, on the filesystem of `folder` (which is left as it was).

    `keeps` are the numbers of checkpoints the runs keep. Each result is handed to `told` as it comes. Failpoints that
    the small run never visits have no trial.
    """
    ground = prepare_ground(folder / "truebatch-drill")
    try:
        results = []
        for name in (name for name in FAILPOINTS if num_visits(ground, name)):
            for action, keep in itertools.product(actions, keeps):
                # With one checkpoint to keep, the last visit but one: the folder is full then.
                nth = max(1, num_visits(ground, name) - 1) if keep == 1 else 1
                results.append(run_trial(ground, Trial(name, action, nth, keep)))
                told(results[-1])
        return tuple(results)
    finally:
        shutil.rmtree(ground.folder, ignore_errors=True)


def prepare_ground(folder: Path) -> Ground:
    """Make the two folders every trial begins from: a run to go on with, and one to replace by a fresh start."""
    folder.mkdir(parents=True)
    _in_child(_make_templates, folder)
    visits, ends = {}, {}
    for start in ("go-on", "fresh"):
        trial = folder / f"quiet-{start}"
        shutil.copytree(folder / start, trial)
        _in_child(_quiet, trial, start == "fresh")
        visits[start] = read_json(trial / "visits.json")
        ends[start] = end_of(trial / "run")
    return Ground(folder, visits, ends)


def num_visits(ground: Ground, name: str) -> int:
    """How often a quiet run visits a failpoint."""
    return ground.visits[_start_for(ground, name)].get(name, 0)


def run_trial(ground: Ground, trial: Trial) -> TrialResult:
    """Fail once, start again, and compare the end with that of the quiet run."""
    start = _start_for(ground, trial.failpoint)
    folder = ground.folder / f"{trial.failpoint}-{trial.action}-{trial.nth}-keep{trial.keep}"
    shutil.copytree(ground.folder / start, folder)
    code = _in_child(_attempt, folder, trial.keep, start == "fresh", trial.spec)
    problem = _check_failure(trial, code) or _check_left(folder, start)
    if not problem:
        code = _in_child(_attempt, folder, trial.keep, False, "")
        problem = f"starting again ended with exit code {code}" if code else ""
    if not problem and end_of(folder / "run") != ground.ends[start]:
        problem = "it went on, but ended otherwise than the quiet run"
    if not problem:
        shutil.rmtree(folder)
    return TrialResult(trial, problem)


def practise(run: Run, *, keep: int, until: int = STEPS, saved: Callable[[int], None] = lambda step: None) -> None:
    """A small real run: a linear model and AdamW, with a log, checkpoints, a best one and a status."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=float(run.config["drill"]["learning_rate"]))
    loaded = load_newest(run.checkpoints)
    first = _restore(loaded, model, optimiser)
    write_status(run, "running", step=first)
    log = open_metrics(run.metrics, step=first if loaded else None)
    for step in range(first + 1, until + 1):
        loss = _train(model, optimiser)
        drawn = random.random() + float(np.random.random())  # noqa: S311 - to see whether the generators go on
        log.write(step, {"loss": loss, "drawn": drawn})
        if step % SAVE_EVERY == 0:
            log.sync()
            _save(run, step, model, optimiser, keep)
            saved(step)
        if step == BEST:
            mark_best(run.checkpoints, step, about={"loss": loss})
    # A loop saves its last step when the period says so and again because it is the last.
    _save(run, until, model, optimiser, keep)
    log.close()
    write_status(run, "done", step=until, exit_code=0)


def end_of(folder: Path) -> dict[str, Any]:
    """What must be equal at the end of two runs: status, log, and every byte of the newest checkpoint."""
    newest = load_newest(folder / "checkpoints")
    manifest = list_checkpoints(folder / "checkpoints")[-1].manifest
    assert newest is not None
    assert manifest is not None
    return {
        "state": read_status(folder)["state"],
        "step": newest.checkpoint.step,
        "rejected": newest.rejected,
        "files": {name: facts.sha256 for name, facts in manifest.files.items()},
        "metrics": (folder / METRICS).read_bytes(),
    }


def _restore(loaded: Loaded | None, model: nn.Module, optimiser: Any) -> int:
    if loaded is None:
        return 0
    parts = loaded.checkpoint.parts
    model.load_state_dict(parts["model"])
    restore_optimiser(optimiser, parts["optimiser"], model.named_parameters())
    restore_random(parts["rng"])
    return loaded.checkpoint.step


def _train(model: nn.Module, optimiser: Any) -> float:
    inputs = torch.randn(4, 8)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return float(loss.detach())


def _save(run: Run, step: int, model: nn.Module, optimiser: Any, keep: int) -> None:
    parts = {
        "model": model.state_dict(),
        "optimiser": optimiser_state(optimiser, model.named_parameters()),
        "rng": random_state(),
    }
    save_checkpoint(run.checkpoints, Checkpoint(step, parts, run.fingerprint), keep=keep)


def _make_templates(folder: Path) -> None:
    """`go-on`: a run at step 2 that was killed in the worst places. `fresh`: a run with another configuration."""
    with open_run(folder / "fresh" / "run", _EARLIER) as run:
        practise(run, keep=1, until=BEGUN)
    with open_run(folder / "go-on" / "run", CONFIG) as run:
        practise(run, keep=1, until=BEGUN)
        with run.metrics.open("ab") as file:
            file.write(b'{"step": 3, "loss": 0.5}\n{"step": 4, "lo')
        (run.checkpoints / f"step-{BEGUN}").rename(run.checkpoints / f".replaced-{BEGUN}-0")
        (run.checkpoints / ".stage-4-0").mkdir()
        (run.checkpoints / ".stage-4-0" / "model.safetensors").write_bytes(b"half")


def _quiet(folder: Path, fresh: bool) -> None:
    with recorded() as visits:
        _attempt(folder, 1, fresh, "")
    write_json(folder / "visits.json", dict(visits))


def _attempt(folder: Path, keep: int, fresh: bool, spec: str) -> None:
    """What one process does: open the run, go on, note every save that was reported as done."""
    if spec:
        with armed(spec):
            _attempt(folder, keep, fresh, "")
        return
    note = folder / "saved"
    try:
        with open_run(folder / "run", CONFIG, fresh=fresh) as run:
            practise(run, keep=keep, saved=lambda step: _note(note, step))
    except RunError as error:
        # Killed before the fresh start came to be: the user gives the same command, with --fresh, again.
        if fresh or "configuration" not in error.wrong:
            raise
        _attempt(folder, keep, True, "")


def _note(path: Path, step: int) -> None:
    with path.open("a") as file:
        file.write(f"{step}\n")


def _start_for(ground: Ground, name: str) -> str:
    return "go-on" if name in ground.visits["go-on"] else "fresh"


def _check_failure(trial: Trial, code: int) -> str:
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
    try:
        work(*arguments)
    except TruebatchError:
        sys.exit(_REFUSED)
    except Exception:
        traceback.print_exc()
        sys.exit(_FAULT)
