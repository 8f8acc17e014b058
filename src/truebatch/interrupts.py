"""Signals that ask a command to stop, from its first line to its last: it always ends with an exit code that is true.

first line -> nothing is open: it exits immediately, 75 -> work: what is open is closed, 75 -> done: the code it has

Nothing here may import what takes time: these handlers stand before torch, typer and the commands are imported.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 75
"""Interrupted, run it again to go on (DESIGN's exit codes)."""
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
"""What asks a command to stop: schedulers, Ctrl-C, a terminal that is closed, Slurm before its time limit."""
WRONG, DO = "interrupted", "run the same command again to go on"
ECHO_SECONDS = 2.0
"""`timeout`, systemd and launchers send the same request twice, or two kinds of it, at one time."""
_IMPORTING = "<frozen importlib"
_SAYING = "truebatch.language.console"


class Interruption(KeyboardInterrupt):
    """A signal has asked the command to stop; its text is the signal's name.

    A class of its own: Python ends a process with SIGINT, whatever its exit code, once a plain `KeyboardInterrupt` has left
    a string that is executed, as the methods of data classes are.
    """


@dataclass(slots=True)
class _SignalState:
    pid: int = 0
    """Of the process that caught the signals; a fork of it has handlers that are not its own."""
    asked: str = ""
    at: float = 0.0
    works: int = 0
    """Above 0, somebody catches `KeyboardInterrupt`."""
    held: int = 0
    """Above 0, something is open that has to be closed."""
    code: int | None = None
    """Of a command that is done."""
    is_lost: bool = False
    """An interruption was raised where Python drops exceptions, and is sent again."""


_state = _SignalState()


def catch_interruptions() -> None:
    """Let signals end this command as above. Only for a program's entry point, in its main thread; once is enough.

    What was ignored before stays ignored, such as SIGHUP under `nohup`.
    """
    if _state.pid == os.getpid():
        return
    _state.pid = os.getpid()
    for number in _numbers():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    sys.unraisablehook = _raised_in_vain
    atexit.register(_ignore_all)  # the first to be registered is the last to be called


@contextmanager
def interruptible() -> Iterator[None]:
    """While open, a signal raises `Interruption`; outside of it, the process exits immediately."""
    _state.works += 1
    try:
        yield
    finally:
        _state.works -= 1


@contextmanager
def holding() -> Iterator[None]:
    """While open, there is something to close: a signal is raised even in the middle of an import."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1


def finished(code: int) -> None:
    """The command is done: only the end of the process is left, and its exit code is fixed."""
    if _state.pid == os.getpid():
        _state.code = code


def asked_by() -> str:
    """The signal that has asked this command to stop; empty if there was none."""
    return _state.asked


def stay() -> None:
    """The interruption was handled, and the command continues."""
    _state.asked = ""


def leave_signals_to_parent() -> None:
    """In a worker process: its parent decides when it ends. A terminal, `timeout` and schedulers send their
    request to all processes of a command, and one that died of it would look like the fault of a sample."""
    for number in _numbers():
        signal.signal(number, signal.SIG_IGN)


def _numbers() -> list[int]:
    return [int(getattr(signal, name)) for name in NAMES if hasattr(signal, name)]


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _state.pid:
        _die_of(number)
        return
    name, is_again = signal.Signals(number).name, _state.is_lost
    _state.is_lost = False
    if _state.asked and not is_again:
        _second(name)
        return
    _state.asked, _state.at = name, time.monotonic()
    if _state.code is not None:
        return
    if not _state.works or (not _state.held and _is_importing(frame)):
        # An exception would come out of the middle of a library's import, as whatever that makes of it.
        _leave(EXIT_INTERRUPTED)
    raise Interruption(name)


def _second(name: str) -> None:
    """A second signal means: do not wait."""
    if name != "SIGINT" and time.monotonic() - _state.at < ECHO_SECONDS:
        return
    _leave(EXIT_INTERRUPTED if _state.code is None else _state.code)


def _leave(code: int) -> None:
    """End the process here; what it has started sees that it is gone."""
    if code == EXIT_INTERRUPTED and _state.code is None:
        with suppress(Exception):
            os.write(2, _words().encode(errors="replace"))
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(code)


def _words() -> str:
    """In the language of the person, where the words are loaded; else in English."""
    saying: Any = sys.modules.get(_SAYING)
    try:
        text: str = saying.error_text(WRONG, _state.asked, DO)
    except Exception:  # half imported
        return "".join(("error: ", WRONG, "\n  seen: ", _state.asked, "\n  do:   ", DO, "\n"))
    return text


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False


def _die_of(number: int) -> None:
    """In a fork: what the signal does to a process that has not caught it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _raised_in_vain(unraisable: Any) -> None:
    """An interruption that came in a destructor or a callback was dropped there: send it again."""
    if not (isinstance(unraisable.exc_value, KeyboardInterrupt) and _state.asked):
        sys.__unraisablehook__(unraisable)
        return
    if _state.code is None and _state.works and not _state.is_lost:
        _state.is_lost = True
        _send_later(int(getattr(signal, _state.asked)))


def _send_later(number: int) -> None:
    from threading import Thread, main_thread

    def send() -> None:
        time.sleep(0.02)
        if _state.is_lost:
            signal.pthread_kill(main_thread().ident or 0, number)

    Thread(target=send, daemon=True).start()


def _ignore_all() -> None:
    """The last of Python: from here on a signal would end the process with its own number."""
    if _state.pid == os.getpid():
        for number in _numbers():
            signal.signal(number, signal.SIG_IGN)
