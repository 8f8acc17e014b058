"""Open a run folder for all processes of a run: rank 0 owns it, the others read its checkpoints and write nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from truebatch.errors import RunError, TruebatchError
from truebatch.training.reducing import num_ranks, rank
from truebatch.training.runs import Run, open_run

MAY_CHANGE = ("devices", "workers", "keep", "epochs", "max_steps", "track", "save_every", "stuck_seconds")
"""Settings of `TrainConfig` that another start of the same run may have: none of them changes a step."""


@contextmanager
def opened_run(out: str | Path | Run | None, config: Any, *, fresh: bool = False) -> Iterator[Run | None]:
    """The run in `out`, made or gone on with; a run that is open already is handed through, None stays None.

    `config` is a `TrainConfig`, or the settings of a system with one under `train`.
    """
    if out is None or isinstance(out, Run):
        yield out
        return
    names = (*MAY_CHANGE, *(f"train.{name}" for name in MAY_CHANGE))
    if rank() > 0:
        yield _wait_for_owner(Path(out))
        return
    with ExitStack() as stack:
        try:
            run = stack.enter_context(open_run(Path(out), config, fresh=fresh, may_change=names))
        except TruebatchError as error:
            _tell(error.wrong)
            raise
        _tell("")
        yield run


def _tell(problem: str) -> None:
    """Let the other ranks go on, or stop with the same reason."""
    if num_ranks() > 1:
        dist.broadcast_object_list([problem], 0)


def _wait_for_owner(folder: Path) -> Run:
    problem: list[Any] = [None]
    dist.broadcast_object_list(problem, 0)
    if problem[0]:
        raise RunError("the run cannot be opened", seen=f"rank 0 says: {problem[0]}", do="see the error of rank 0")
    return Run(folder, {})
