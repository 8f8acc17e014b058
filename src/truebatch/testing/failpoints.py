"""Places where a run can be made to fail on purpose, so that recovery is shown and not hoped for.

`TRUEBATCH_FAILPOINT=name:action:nth` (or `armed(...)`) -> the nth visit of that place kills, raises, sleeps or exits
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest

VARIABLE = "TRUEBATCH_FAILPOINT"
EXIT_CODE = 86
SLEEP_SECONDS = 3600.0
ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "edquot": errno.EDQUOT, "erofs": errno.EROFS}
OUT_OF_MEMORY = "oom"
ACTIONS = ("kill", "exit", "sleep", OUT_OF_MEMORY, *ERRORS)

FAILPOINTS: dict[str, str] = {
    "write.before_open": "a small file is about to be replaced",
    "write.opened": "its draft exists and is empty",
    "write.half_written": "half of the draft is written",
    "write.written": "the draft is whole, not yet on the disk",
    "write.synced": "the draft is on the disk, under its own name",
    "write.renamed": "the draft has taken the name of the file",
    "write.folder_synced": "the new name is on the disk too",
    "run.before_lock": "the run folder exists, it has no owner yet",
    "run.locked": "this process owns the run",
    "run.owner_written": "the owner has left its name",
    "run.before_moved_aside": "a fresh start is about to move the earlier run aside",
    "run.moved_aside": "the earlier run has its new name",
    "run.relocked": "the new, empty run folder is owned",
    "run.config_written": "the configuration is written",
    "run.opened": "the run is ready",
    "clean.before_delete": "a leftover of a killed save is about to be deleted",
    "clean.deleted": "a leftover is deleted",
    "clean.before_restore": "a checkpoint whose replacement never came is about to get its name back",
    "clean.restored": "it has its name back",
    "load.before_check": "a checkpoint is about to be compared with its manifest",
    "load.checked": "a checkpoint is what its manifest says",
    "load.read": "a checkpoint is in memory",
    "checkpoint.before_space_check": "a save begins",
    "checkpoint.before_stage": "there is room for the checkpoint",
    "checkpoint.staged": "the stage folder exists",
    "checkpoint.file_opened": "a file of the checkpoint exists and is empty",
    "checkpoint.file_begun": "a part of a file is written",
    "checkpoint.file_written": "a file is whole, not yet on the disk",
    "checkpoint.file_synced": "a file is on the disk",
    "checkpoint.before_manifest": "all files but the manifest are on the disk",
    "checkpoint.after_manifest": "the manifest is on the disk",
    "checkpoint.stage_synced": "the names inside the stage folder are on the disk",
    "checkpoint.old_moved": "an earlier checkpoint of the same step has made room",
    "checkpoint.renamed": "the stage folder has become the checkpoint",
    "checkpoint.committed": "the new name is on the disk; the save holds from here on",
    "prune.before_rename": "an old checkpoint is about to go",
    "prune.renamed": "the old checkpoint is no longer listed",
    "prune.deleted": "the old checkpoint is deleted",
    "prune.done": "only the checkpoints to keep are left",
    "best.before_mark": "the best checkpoint is about to be noted",
    "best.marked": "the best checkpoint is noted",
    "metrics.before_cut": "lines after the checkpoint are about to be removed",
    "metrics.cut": "the log ends with the checkpoint's step",
    "metrics.half_written": "half of a line is written",
    "metrics.written": "a line is written",
    "metrics.synced": "the lines are on the disk",
    "status.before_write": "the status is about to change",
    "status.written": "the status is changed",
    "step.loading": "the micro-batches of a step are loaded",
    "step.transfer": "a micro-batch is about to go to the device",
    "step.forward": "a micro-batch is on the device",
    "step.backward": "its loss is there, its gradient not yet",
    "step.accumulated": "its gradient is added to those before it",
    "step.optimiser": "the gradient of the step is whole, an optimiser is about to update",
    "step.validation": "a micro-batch is validated",
    "export.before_write": "the trained model is about to be exported",
    "folder.written": "a folder is written, under another name",
    "folder.old_removed": "an earlier one is gone",
    "folder.renamed": "the new one has its name",
    "export.done": "and it is noted which model it is",
    "journal.before_commit": "the results of a scored batch are there, none is written",
    "journal.in_commit": "they are written, not committed",
    "journal.committed": "they are committed",
}
"""Every failpoint and what is true when it is visited, in the order of a run."""


@dataclass(slots=True)
class _Trap:
    name: str
    action: str
    nth: int
    seconds: float = SLEEP_SECONDS
    visits: int = 0


@dataclass(slots=True)
class _FailpointState:
    trap: _Trap | None = None
    record: Counter[str] | None = None
    is_read: bool = False
    is_idle: bool = False


_state = _FailpointState()


def failpoint(name: str) -> None:
    """Do nothing, unless this place is armed: then fail here as asked."""
    if not _state.is_idle:
        _visit(name)


@contextmanager
def armed(spec: str) -> Iterator[None]:
    """Arm one failpoint, written as in the environment variable, inside the `with` block.

    >>> from truebatch.testing.failpoints import armed, failpoint
    >>> with armed("step.loading:eio"):
    ...     failpoint("step.loading")
    Traceback (most recent call last):
    OSError: ...
    """
    _read_variable()
    before, _state.trap, _state.is_idle = _state.trap, parse_failpoint(spec), False
    try:
        yield
    finally:
        _state.trap = before


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Count the visits of every failpoint inside the `with` block, so that a sweep knows where to fail."""
    before, _state.record, _state.is_idle = _state.record, Counter(), False
    try:
        yield _state.record
    finally:
        _state.record = before


def parse_failpoint(spec: str) -> _Trap:
    """Read `name:action`, `name:action:nth` or `name:sleep:nth:seconds`; anything else is refused."""
    name, action, nth, seconds = (*spec.split(":"), "", "", "")[:4]
    if name not in FAILPOINTS or action not in ACTIONS or spec.count(":") > 3:
        known, got = (ACTIONS, action) if name in FAILPOINTS else (tuple(FAILPOINTS), name)
        raise ConfigError(
            f"not a failpoint: {got!r}{nearest(got, list(known))}",
            seen=f"{VARIABLE}={spec}",
            do=f"write name:action:nth, with an action of {', '.join(ACTIONS)}",
        )
    try:
        return _Trap(name, action, int(nth or 1), float(seconds or SLEEP_SECONDS))
    except ValueError as error:
        raise ConfigError(
            "the visit of a failpoint must be a number", seen=f"{VARIABLE}={spec}", do="write name:action:1"
        ) from error


def _visit(name: str) -> None:
    _read_variable()
    if _state.record is not None:
        _state.record[name] += 1
    trap = _state.trap
    _state.is_idle = trap is None and _state.record is None
    if trap is not None and trap.name == name:
        trap.visits += 1
        if trap.visits == trap.nth:
            _spring(trap)


def _read_variable() -> None:
    if not _state.is_read:
        spec = os.environ.get(VARIABLE)
        _state.trap = parse_failpoint(spec) if spec else None
        _state.is_read = True


def _spring(trap: _Trap) -> None:
    if trap.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trap.action == "exit":
        os._exit(EXIT_CODE)
    if trap.action == "sleep":
        time.sleep(trap.seconds)
        return
    if trap.action == OUT_OF_MEMORY:
        raise MemoryError(f"out of memory (failpoint {trap.name})")
    number = ERRORS[trap.action]
    raise OSError(number, f"{os.strerror(number)} (failpoint {trap.name})")
