"""`--devices N`: start the N processes of a run here, pass signals on, and end with the exit code that is true.

torchrun turns every failure into exit code 1; here the first process that fails decides.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from truebatch.errors import ConfigError
from truebatch.interrupts import DO, NAMES, WRONG, holding
from truebatch.language.console import say_error, shown
from truebatch.progress import paused
from truebatch.training.run_dir.run_dir import STATUS, RunFolder, RunState, read_status, write_status
from truebatch.training.run_dir.signals import EXIT_INTERRUPTED

STARTED = "TRUEBATCH_STARTED"
"""Set in the processes started here: their input ends when this process does."""
PROGRAM = (sys.executable, "-m", "truebatch")
FAULT = 70
_GRACE_SECONDS = 20.0
_SAME_SECONDS = 2.0
_INTERRUPTING = ("SIGTERM", "SIGINT", "SIGKILL", "SIGHUP", "SIGUSR1")


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One process of the run."""

    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes] | None
    """What it writes to stderr; None for rank 0, which writes to ours."""


def ranks_around() -> int | None:
    """How many processes a launcher such as torchrun has started; None without one."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() and "RANK" in os.environ else None


def check_ranks(devices: int) -> None:
    """Under a launcher, raise `ConfigError` if it started another number of processes than asked for."""
    around = ranks_around()
    if around is not None and around != devices:
        raise ConfigError(
            "the launcher has started another number of processes than asked for",
            seen=f"WORLD_SIZE={around}, devices={devices}",
            do=f"give --devices {around}, or start it without torchrun: --devices starts the processes itself",
        )


def launch(arguments: Sequence[str], devices: int, *, folder: Path, program: Sequence[str] = PROGRAM) -> int:
    """Run `truebatch ARGUMENTS` in `devices` processes on this machine; the exit code of the run in `folder`.

    A signal to this process reaches all of them. If this process is killed, they save and stop.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="truebatch-") as place:
        children: list[Child] = []
        with holding(), paused(), _passing_signals(children) as asked:
            try:
                for rank in range(devices):
                    if not asked:
                        children.append(_start([*program, *arguments], rank, devices, port, Path(place)))
                first = _wait(children) if len(children) == devices else None
            finally:
                _stop(children)
        code = _exit_code(children, first) if len(children) == devices else EXIT_INTERRUPTED
        if asked and code == EXIT_INTERRUPTED and any(child.process.returncode < 0 for child in children):
            say_error(WRONG, asked[0], DO)  # before they could say so themselves
        else:
            _explain(first)
        _correct_status(folder, first, code)
        for child in children:
            if child.errors is not None:
                child.errors.close()
    return code


def stop_with_parent() -> None:
    """In a process started by `launch`: stop, saved, when the starting process is gone."""
    if os.environ.get(STARTED):
        threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    os.read(0, 1)  # Nobody writes: this returns when the other end is closed.
    os.kill(os.getpid(), signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(command: Sequence[str], rank: int, devices: int, port: int, place: Path) -> Child:
    threads = str(max(1, (os.cpu_count() or 1) // devices))
    environment = {
        "OMP_NUM_THREADS": threads,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        STARTED: "1",
    }
    errors = (place / f"rank-{rank}").open("w+b") if rank else None
    process = subprocess.Popen(  # noqa: S603
        list(command),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # Ctrl-C of the terminal comes through this process, once.
    )
    return Child(rank, process, errors)


@contextmanager
def _passing_signals(children: Sequence[Child]) -> Iterator[list[str]]:
    """Hand signals on to the children there are; the names of those that came."""
    asked: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        _send(children, number)

    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(children: Sequence[Child], number: int) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(number)


def _wait(children: Sequence[Child]) -> Child | None:
    """Until all have ended well or saved, or one has failed: that one.

    A rank that left to be started again (75) decides, if others then fail without it or cannot end.
    """
    left, since = None, 0.0
    while True:
        ended = [child for child in children if child.process.poll() is not None]
        if left is None:
            left = next((child for child in ended if child.process.returncode == EXIT_INTERRUPTED), None)
            since = time.monotonic()
        failed = [child for child in ended if child.process.returncode not in (0, EXIT_INTERRUPTED)]
        if failed:
            return left or _speaker(children, failed[0])
        if len(ended) == len(children):
            return None
        if left is not None and time.monotonic() - since > _GRACE_SECONDS:
            return left
        time.sleep(0.05)


def _speaker(children: Sequence[Child], failed: Child) -> Child:
    """Ranks that fail for the same reason say it once: rank 0, which has said it already, if it ends in the same way."""
    try:
        code = children[0].process.wait(_SAME_SECONDS)
    except subprocess.TimeoutExpired:
        return failed
    return children[0] if code == failed.process.returncode else failed


def _stop(children: Sequence[Child]) -> None:
    """End what still runs: asked first, then by force. Others wait for a failed rank and would never end."""
    for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
        _send(children, number)
        for child in children:
            try:
                child.process.wait(seconds)
            except subprocess.TimeoutExpired:
                break
    for child in children:
        if child.process.stdin is not None:
            child.process.stdin.close()


def _exit_code(children: Sequence[Child], first: Child | None) -> int:
    if first is None:
        return EXIT_INTERRUPTED if any(child.process.returncode for child in children) else 0
    code = int(first.process.returncode)
    if code >= 0:
        return code
    return EXIT_INTERRUPTED if _signal_name(code) in _INTERRUPTING else FAULT


def _signal_name(code: int) -> str:
    known = {int(s): s.name for s in signal.Signals}
    return known.get(-code, f"signal {-code}")


def _explain(first: Child | None) -> None:
    if first is None:
        return
    if first.process.returncode < 0:
        say_error(
            f"the process of rank {first.rank} was ended by {_signal_name(first.process.returncode)}",
            f"process {first.process.pid}; the other processes were stopped",
            "run the same command again to go on; if it had no memory left, lower train.cells",
        )
    elif first.errors is not None:
        first.errors.seek(0)
        sys.stderr.write(shown(f"rank {first.rank} failed first:\n{first.errors.read().decode(errors='replace')}"))


def _correct_status(folder: Path, first: Child | None, code: int) -> None:
    """The owner may have been stopped before it could say how the run ended."""
    if first is None or not (folder / STATUS).exists():
        return
    status = read_status(folder)
    if status.get("exit_code") != code and status.get("state") in ("running", "interrupted", "failed"):
        state: RunState = "interrupted" if code == EXIT_INTERRUPTED else "failed"
        message = f"rank {first.rank} ended with {first.process.returncode}"
        write_status(RunFolder(folder, {}), state, step=int(status.get("step", 0)), exit_code=code, message=message)
