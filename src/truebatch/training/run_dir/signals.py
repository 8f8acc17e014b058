"""Being asked to stop: SIGTERM, SIGINT, SIGHUP and SIGUSR1 set a flag that the loop reads between micro-batches.

signal -> flag -> the loop finishes the step, saves and ends with exit code 75; a second Ctrl-C stops immediately
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from truebatch.interrupts import EXIT_INTERRUPTED, NAMES, Interruption

__all__ = ["EXIT_INTERRUPTED", "StopFlag", "StopRequested", "catch_signals"]


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Who asked the run to stop, and when."""

    signal_name: str
    monotonic_seconds: float
    exit_code: int = EXIT_INTERRUPTED

    def __str__(self) -> str:
        return f"asked to stop by {self.signal_name}"


@dataclass(slots=True)
class StopFlag:
    """What the loop reads; `requested` stays None until a signal came."""

    requested: StopRequested | None = None
    note: str = ""
    """Why signals are not caught here; empty when they are."""
    _ctrl_c: float | None = None

    def request(self, signal_name: str) -> None:
        """Ask the loop to stop, as a signal does; the first asker is remembered."""
        self.requested = self.requested or StopRequested(signal_name, time.monotonic())

    def is_second_ctrl_c(self) -> bool:
        """Note a Ctrl-C; True when the user has pressed it before."""
        now, before = time.monotonic(), self._ctrl_c
        self._ctrl_c = now if before is None else before
        return before is not None and now - before >= _echo_seconds()


@contextmanager
def catch_signals() -> Iterator[StopFlag]:
    """Catch the signals inside the `with` block and restore the handlers after it.

    Python lets only the main thread do that. Elsewhere the flag is never set by a signal, and its `note` says so.
    A signal that was ignored before (as under `nohup`) stays ignored.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        flag.note = "signals cannot be caught outside the main thread: stop this run through its flag"
        yield flag
        return
    before: dict[int, Any] = {}
    try:
        for number in _numbers():
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, _handler(flag))
        yield flag
    finally:
        for number, handler in before.items():
            # None: the handler was not set from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _echo_seconds() -> float:
    # A launcher of several processes hands on the Ctrl-C that the terminal has already sent to each of them.
    return 1.0 if "LOCAL_RANK" in os.environ else 0.0


def _numbers() -> list[int]:
    return [int(getattr(signal, name)) for name in NAMES if hasattr(signal, name)]


def _handler(flag: StopFlag) -> Any:
    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and flag.is_second_ctrl_c():
            raise Interruption(name)
        flag.request(name)

    return handle
