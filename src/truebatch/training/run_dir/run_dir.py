"""A run is a folder: its configuration, its log, its status, its plan and its checkpoints, with one owner at a time.

runs/<name>/{config.yaml, metrics.jsonl, status.json, plan/, checkpoints/}
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import psutil
from filelock import FileLock, Timeout

from truebatch.config.load import dump_config
from truebatch.config.yaml_files import parse_yaml, read_yaml
from truebatch.errors import RunError, TruebatchError
from truebatch.interrupts import EXIT_INTERRUPTED
from truebatch.io.atomic_files import (
    corrupt_file_errors,
    read_json,
    remove_drafts,
    storage_error,
    sync_folder,
    write_json,
    write_text,
)
from truebatch.testing.failpoints import failpoint
from truebatch.training.checkpoint.retention import clean_leftovers

CONFIG, METRICS, STATUS, OWNER, LOCK = "config.yaml", "metrics.jsonl", "status.json", ".owner.json", ".lock"
ABOUT = "run.json"
"""The file of a run that names its system."""
EQUALITY = "equality.json"
"""What the check of the first step has found, and what it holds for."""
RunState = Literal["running", "done", "interrupted", "failed"]
_MOST_BYTES = 1 << 20
_RELEASE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An open run folder that this process owns."""

    folder: Path
    config: Mapping[str, Any]
    cleaned: tuple[str, ...] = ()
    """Leftovers of killed saves that were removed when the run was opened."""
    previous: Path | None = None
    """Where a fresh start has moved the earlier run."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints; made by the first save."""
        return self.folder / "checkpoints"

    @property
    def plan(self) -> Path:
        """The folder of the plan files."""
        return self.folder / "plan"

    @property
    def metrics(self) -> Path:
        """The log, for `open_metrics`."""
        return self.folder / METRICS

    @property
    def fingerprint(self) -> str:
        """A hash of the configuration, for checkpoints."""
        return config_fingerprint(self.config)


@contextmanager
def open_run(
    folder: Path, config: object, *, fresh: bool = False, may_change: Collection[str] = ()
) -> Iterator[RunFolder]:
    """Own a run folder inside the `with` block: create it, or resume it if its configuration is the same.

    `config` is a dataclass or a mapping. A changed field raises `RunError` with its name, its old and its new value,
    unless it is in `may_change` (dotted names). `fresh` moves an earlier run aside, to `<name>.previous-1`, and begins
    anew. A second process gets `RunError` with the owner's process id and host; a killed owner's lock is free at once.
    """
    values = plain_config(config)
    folder = Path(folder)
    previous = None
    try:
        lock = _acquire(folder)
        try:
            if fresh and (folder / CONFIG).exists():
                previous, lock = _move_aside(folder, lock)
            run = _prepare(folder, values, previous, may_change)
            failpoint("run.opened")
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise storage_error(RunError, error, what=f"the run {folder.name}", folder=folder) from error
    try:
        yield run
    finally:
        lock.release()


def plain_config(config: object) -> dict[str, Any]:
    """A configuration as the plain values that `config.yaml` holds."""
    return parse_yaml(dump_config(config), name=CONFIG).values


def config_fingerprint(config: object) -> str:
    """A hash that changes with every value of a configuration, and with nothing else; None is as good as absent."""
    values = _flat(config if isinstance(config, Mapping) else plain_config(config))
    given = sorted((key, repr(value)) for key, value in values.items() if value is not None)
    return hashlib.sha256(repr(given).encode()).hexdigest()


def write_status(
    run: RunFolder,
    state: RunState,
    *,
    step: int,
    num_steps: int | None = None,
    exit_code: int | None = None,
    message: str = "",
    reason: str | None = None,
) -> None:
    """Replace `status.json`: state, step, how often it was started, exit code, time and process; why it ended, for programs
    and in words.

    Without a `reason`, a start that ended is `interrupted` or ended by an `error`, as its exit code says.
    """
    if state not in get_args(RunState):
        raise RunError("a run has no such state", seen=repr(state), do=f"use one of: {', '.join(get_args(RunState))}")
    if reason is None and exit_code:
        reason = "interrupted" if exit_code == EXIT_INTERRUPTED else "error"
    ended = {"exit_code": exit_code, "reason": reason, "message": message}
    before = _kept_status(run.folder)
    starts = int(before.get("starts", 0)) + (state == "running")
    status = {"state": state, "step": step, "num_steps": num_steps or before.get("num_steps"), "starts": starts}
    status |= {**ended, **_this_process()}
    status |= _kept_equality(run.folder)
    try:
        failpoint("status.before_write")
        write_json(run.folder / STATUS, status)
        failpoint("status.written")
    except OSError as error:
        raise storage_error(RunError, error, what=STATUS, folder=run.folder) from error


def _kept_status(folder: Path) -> dict[str, Any]:
    """What the last start has written; nothing where the file is missing or damaged: it is about to be replaced."""
    try:
        kept = read_json(folder / STATUS, max_bytes=_MOST_BYTES) if (folder / STATUS).exists() else None
    except TruebatchError:
        return {}
    return kept if isinstance(kept, dict) and isinstance(kept.get("starts", 0), int) else {}


def _kept_equality(folder: Path) -> dict[str, Any]:
    """`equality` of the status; nothing before the first step, or where the file is damaged: it is then made again."""
    try:
        kept = read_json(folder / EQUALITY, max_bytes=_MOST_BYTES) if (folder / EQUALITY).exists() else None
    except TruebatchError:
        return {}
    return {"equality": kept["result"]} if isinstance(kept, dict) and "result" in kept else {}


def read_status(folder: Path) -> dict[str, Any]:
    """What `status.json` says; `state` is `new` without one, and `interrupted` when the running process was killed."""
    if not (folder / STATUS).exists():
        return {"state": "new", "step": 0, "exit_code": None, "reason": None, "message": ""}
    with corrupt_file_errors(folder / STATUS):
        status = dict(read_json(folder / STATUS, max_bytes=_MOST_BYTES))
    if status.get("state") == "running" and _is_dead(status):
        status |= {
            "state": "interrupted",
            "reason": "killed",
            "message": f"process {status.get('pid')} is no longer there",
        }
    return status


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, by dotted name, with the old and the new value; None where a side has none."""
    before, after = _flat(old), _flat(new)
    names = [*before, *(name for name in after if name not in before)]
    return {n: (before.get(n), after.get(n)) for n in names if repr(before.get(n)) != repr(after.get(n))}


def _acquire(folder: Path) -> FileLock:
    folder.mkdir(parents=True, exist_ok=True)
    failpoint("run.before_lock")
    lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        _wait_for_dead_owner(folder, lock)
    try:
        failpoint("run.locked")
        write_json(folder / OWNER, _this_process())
        failpoint("run.owner_written")
    except BaseException:
        lock.release()
        raise
    return lock


def _wait_for_dead_owner(folder: Path, lock: FileLock) -> None:
    """Workers forked by a killed owner share its lock until they notice; a living owner is refused immediately."""
    deadline = time.monotonic() + _RELEASE_SECONDS
    while True:
        owner = _owner(folder)
        if not _is_dead(owner) or time.monotonic() > deadline:
            _refuse_owned(folder, owner)
        try:
            lock.acquire(timeout=0.2)
            return
        except Timeout:
            continue


def _refuse_owned(folder: Path, owner: Mapping[str, Any]) -> NoReturn:
    raise RunError(
        f"another process owns the run {folder.name}",
        seen=f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}, "
        f"since {owner.get('time', 'an unknown time')}, in {folder}",
        do="wait for it or stop it, or give this run another folder (--out)",
    )


def _owner(folder: Path) -> dict[str, Any]:
    try:
        owner = read_json(folder / OWNER, max_bytes=_MOST_BYTES)
    except TruebatchError:
        # The owner has the lock and has not yet left its name.
        return {}
    return owner if isinstance(owner, dict) else {}


def _move_aside(folder: Path, lock: FileLock) -> tuple[Path, FileLock]:
    """Give the earlier run another name in one rename, then own a new, empty folder."""
    failpoint("run.before_moved_aside")
    number = 1
    while (previous := folder.with_name(f"{folder.name}.previous-{number}")).exists():
        number += 1
    folder.rename(previous)
    sync_folder(folder.parent)
    failpoint("run.moved_aside")
    try:
        fresh = _acquire(folder)
    finally:
        lock.release()
    failpoint("run.relocked")
    return previous, fresh


def _prepare(folder: Path, values: dict[str, Any], previous: Path | None, may_change: Collection[str]) -> RunFolder:
    remove_drafts(folder)
    remove_drafts(folder / "checkpoints")
    if (folder / CONFIG).exists():
        _check_config(folder, values, may_change)
    elif (folder / "checkpoints").exists():
        raise RunError(
            f"{folder} holds checkpoints but no {CONFIG}",
            seen=f"no {CONFIG} to compare with",
            do=f"bring {CONFIG} back, or give this run another folder",
        )
    else:
        (folder / "plan").mkdir(exist_ok=True)
        write_text(folder / CONFIG, dump_config(values))
    failpoint("run.config_written")
    return RunFolder(folder, values, clean_leftovers(folder / "checkpoints"), previous)


def _check_config(folder: Path, values: dict[str, Any], may_change: Collection[str]) -> None:
    changes = config_changes(read_yaml(folder / CONFIG).values, values)
    refused = {name: pair for name, pair in changes.items() if name not in may_change}
    if refused:
        seen = "; ".join(f"{name}: {old!r} before, {new!r} now" for name, (old, new) in list(refused.items())[:5])
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise RunError(
            f"this run was made with another configuration: {next(iter(refused))} is changed{more}",
            seen=f"{seen}, in {folder / CONFIG}",
            do="set it back, give another folder (--out), or start again (--fresh), which moves the old run aside",
        )
    if changes:
        write_text(folder / CONFIG, dump_config(values))


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def _this_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process_start": psutil.Process().create_time(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _is_dead(process: Mapping[str, Any]) -> bool:
    """The process was on this host and is gone; its number may belong to another one by now."""
    pid, start = process.get("pid"), process.get("process_start")
    if process.get("host") != socket.gethostname() or not isinstance(pid, int) or not isinstance(start, float):
        return False
    try:
        now = psutil.Process(pid)
        return abs(now.create_time() - start) > 1.0 or now.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
