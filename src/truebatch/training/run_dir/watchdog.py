"""A run that no longer moves is reported with the stacks of all its threads, and ends so that it can go on.

beat() after each micro-batch -> none for `timeout` seconds -> stacks to stderr -> exit code 75
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from truebatch.errors import RunError
from truebatch.training.run_dir.signals import EXIT_INTERRUPTED

_LOG = logging.getLogger(__name__)
_GRACE_SECONDS = 3.0
_REARM_SECONDS = 1.0


@dataclass(slots=True)
class Watchdog:
    """An armed watchdog; made by `watch_progress`."""

    timeout_seconds: float
    file: Any
    last: float = field(default_factory=time.monotonic)
    doing: str = "starting"
    has_lacked: bool = False
    """No thread could be started for it, once."""
    _armed_at: float = field(default=0.0, init=False)

    def beat(self, doing: str = "") -> None:
        """Say that the run moves, and what it does next (it stands in the report)."""
        self.last = time.monotonic()
        self.doing = doing or self.doing
        if self.last - self._armed_at > _REARM_SECONDS:
            self._arm()

    def _arm(self) -> None:
        # The thread below needs the interpreter lock. Code that hangs while holding it is left to this timer, which
        # does not; it can only exit with code 1.
        self._armed_at = time.monotonic()
        seconds = self.timeout_seconds + _GRACE_SECONDS + _REARM_SECONDS
        with _threads_may_lack(self):
            faulthandler.dump_traceback_later(seconds, exit=True, file=self.file)


@contextmanager
def _threads_may_lack(dog: Watchdog) -> Iterator[None]:
    """A thread needs memory for its stack. A run that is short of memory is not ended because it cannot be watched."""
    try:
        yield
    except RuntimeError as error:
        if not dog.has_lacked:
            _LOG.warning("no thread can be started to detect a stuck run (%s); the run continues", error)
        dog.has_lacked = True


@contextmanager
def watch_progress(
    timeout_seconds: float,
    *,
    who: str = "this process",
    on_stuck: Callable[[str], None] | None = None,
    file: Any = None,
) -> Iterator[Watchdog]:
    """Watch the block: without a `beat()` for `timeout_seconds`, all stacks are printed and the process exits with 75.

    `who` names the process (its rank) in the report; `on_stuck` is called with the report's first line before the end.
    """
    if not timeout_seconds > 0:
        raise RunError("a watchdog needs time", seen=f"timeout_seconds={timeout_seconds}", do="give it seconds above 0")
    dog = Watchdog(timeout_seconds, file or sys.__stderr__)
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(dog, done, who, on_stuck), name="truebatch-watchdog", daemon=True)
    dog.beat()
    with _threads_may_lack(dog):
        thread.start()
    try:
        yield dog
    finally:
        done.set()
        faulthandler.cancel_dump_traceback_later()
        if thread.ident is not None:
            thread.join(timeout=_GRACE_SECONDS)


def _watch(dog: Watchdog, done: threading.Event, who: str, on_stuck: Callable[[str], None] | None) -> None:
    while not done.wait(max(0.01, dog.last + dog.timeout_seconds - time.monotonic())):
        silent = time.monotonic() - dog.last
        if silent >= dog.timeout_seconds:
            _give_up(dog, f"{who} is stuck: nothing happened for {silent:.1f} s while {dog.doing}", on_stuck)


def _give_up(dog: Watchdog, report: str, on_stuck: Callable[[str], None] | None) -> None:
    try:
        dog.file.write(
            f"error: {report}\n  seen: the stacks below, process {os.getpid()}\n  do:   run the same command again\n"
        )
        dog.file.flush()
        faulthandler.dump_traceback(file=dog.file, all_threads=True)
        if on_stuck is not None:
            on_stuck(report)
    except BaseException:
        # Nobody is left to raise it to: the process ends here.
        traceback.print_exc(file=dog.file)
    finally:
        os._exit(EXIT_INTERRUPTED)
