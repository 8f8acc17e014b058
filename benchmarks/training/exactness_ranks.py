"""Starts of a run in one to four processes on a CPU, each forked from the process that has read the samples.

world, budget, order, what goes wrong and when -> ranks over gloo -> digests and losses of all steps, from the log of the run
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.exactness_cases import ExactnessCase, settled
from truebatch.errors import RestartError
from truebatch.testing.failpoints import armed
from truebatch.training.callbacks import CallbackAction
from truebatch.training.exactness.atoms import ORDER
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.run_dir.run_dir import METRICS
from truebatch.training.trainer import train

PATIENCE_SECONDS = 300.0
RECOVERED = "ran out of memory"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong on one rank, once so many steps are done."""

    step: int
    rank: int
    failpoint: str
    """With what happens there, as `TRUEBATCH_FAILPOINT` has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start of a run."""

    world: int = 1
    resident: int = 1
    """Atoms on the device at a time."""
    order: str = ""
    steps: int = 100
    save_every: int = 1_000_000
    faults: tuple[Fault, ...] = ()


class Faults:
    """Arms each failpoint when its step begins."""

    name = "faults"

    def __init__(self, faults: Mapping[int, str], stack: ExitStack) -> None:
        self._faults, self._stack = faults, stack

    def before_step(self, step: int) -> None:
        """From here on the failpoint may be visited."""
        if step in self._faults:
            self._stack.enter_context(armed(self._faults[step]))

    def after_step(self, step: int) -> CallbackAction:
        """Nothing is asked for."""
        return CallbackAction()

    def ended(self, step: int) -> None:
        """Nothing is open."""

    def state(self) -> Mapping[str, Any]:
        """Nothing is kept."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing was kept."""


def run_ranks(case: ExactnessCase, start: Start, folder: Path) -> list[int]:
    """Exit codes of all ranks; once one of them has ended badly, the others are killed."""
    context, port = multiprocessing.get_context("fork"), _free_port()
    ranks = [
        context.Process(target=_child, args=(case, start, folder, rank, port), daemon=True)
        for rank in range(start.world)
    ]
    for process in ranks:
        process.start()
    left = list(ranks)
    while left:
        ended = multiprocessing.connection.wait([process.sentinel for process in left], PATIENCE_SECONDS)
        left = [process for process in left if process.sentinel not in ended]
        if not ended or any(process.exitcode for process in ranks if process not in left):
            for process in left:
                process.kill()
    for process in ranks:
        process.join()
    return [process.exitcode or 0 for process in ranks]


def steps_of(folder: Path) -> list[tuple[int, str, float]]:
    """Number, digest and loss of every step in the log of a run."""
    records = read_metrics(folder / METRICS)
    return [(one["step"], one["digest"], one["loss"]) for one in records if "digest" in one]


def recoveries(folder: Path) -> int:
    """Steps that were run again for want of memory, on any rank."""
    return sum(json.loads(path.read_text()) for path in folder.parent.glob(f"{folder.name}-recovered-*"))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _child(case: ExactnessCase, start: Start, folder: Path, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"ACCELERATE_USE_CPU": "true", ORDER: start.order}
    if start.world > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(start.world), "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }  # fmt: skip
    try:
        _train(case, start, folder, rank)
    except RestartError:  # another rank was killed
        os._exit(75)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # what the parent has opened is not closed twice


def _train(case: ExactnessCase, start: Start, folder: Path, rank: int) -> None:
    said: list[str] = []
    model = case.task.build_model()
    config = settled(
        case, devices=start.world, cells=start.resident * (case.settings.atom_cells or 0), max_steps=start.steps,
        save_every=start.save_every,
    )  # fmt: skip
    mine = {fault.step: fault.failpoint for fault in start.faults if fault.rank == rank}
    with ExitStack() as stack:
        callbacks = [*case.callbacks(model, folder), Faults(mine, stack)]
        train(
            model, case.task.objective, case.data, config, groups=case.groups(model), out=folder, say=said.append,
            callbacks=callbacks,
        )  # fmt: skip
    number = sum(RECOVERED in line for line in said)
    (folder.parent / f"{folder.name}-recovered-{rank}").write_text(str(number))
