"""What a command is doing while it says nothing else: one line that is rewritten on a terminal, a line now and then in a file.

stage("reading x.jsonl", total) -> silent for a second -> "reading x.jsonl: 1,200/5,000, 0:03 so far, 0:09 left"

Work anywhere names its stages; they cost nothing until a command shows them. Standard output belongs to results.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO, TypeVar

from truebatch.language.console import before_output, one_line, unfiltered
from truebatch.language.locale import language
from truebatch.language.translate import in_words

SWITCH = "TRUEBATCH_PROGRESS"
"""Set to `off` in the environment, nothing is shown."""
SILENT_SECONDS = 1.0
"""On a terminal, of silence before the line appears."""
SILENT_SECONDS_IN_FILES = 2.0
LINE_SECONDS, SHARE = 5.0, 0.1
"""Between two lines in a file: at least so many seconds, and this share of what the stage has taken."""
_LOOK_SECONDS = 0.25
_ERASE = "\r\033[K"
T = TypeVar("T")


class Stage:
    """A part of the work: what it is, how much of it is done, how much there is."""

    def __init__(self, what: str, total: int = 0, *, began: float | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self.text = ""
        """Shown in place of what is counted, where the work has better words."""
        self.began = time.monotonic() if began is None else began

    def advance(self, number: int = 1) -> None:
        """So much more is done."""
        self.done += number

    def line(self) -> str:
        """What a person reads: done, all, the time taken and the time left at this pace."""
        took = time.monotonic() - self.began
        parts = [self.text] if self.text else []
        if self.done and not parts:
            parts.append(f"{self.done:,}/{self.total:,}" if self.total else f"{self.done:,}")
        parts.append(f"{_clock(took)} so far")
        if self.total and self.done and not self.text:
            parts.append(f"{_clock(took * max(self.total - self.done, 0) / self.done)} left")
        colon, comma = ("：", "，") if language() == "zh" else (": ", ", ")
        return one_line(in_words(self.what) + colon + comma.join(map(in_words, parts)))


_stages: list[Stage] = []
_known: list[str] = []
"""What the last stage was, once there was one."""


@contextmanager
def stage(what: str, total: int = 0) -> Iterator[Stage]:
    """While open, this is what the command is doing.

    >>> with stage("reading chats.jsonl", 3) as reading:
    ...     reading.advance(2)
    ...     reading.line()
    'reading chats.jsonl: 2/3, 0:00 so far, 0:00 left'
    """
    with opened(Stage(what, total)) as new:
        yield new


@contextmanager
def opened(new: Stage) -> Iterator[Stage]:
    """The same for a stage that somebody else tells how far it is."""
    _stages.append(new)
    _known[:] = [new.what]
    try:
        yield new
    finally:
        with suppress(ValueError):
            _stages.remove(new)


def counted(items: Iterable[T], what: str, total: int = 0) -> Iterator[T]:
    """The items, one after the other; each counts as done when the next is asked for."""
    with stage(what, total) as new:
        for item in items:
            yield item
            new.advance()


def open_stages() -> Sequence[Stage]:
    """Those that are open, the innermost last."""
    return tuple(_stages)


def current_line() -> str:
    """The line of the innermost stage that is open for a while, for a display that draws itself; else nothing."""
    found = _stages[-1] if _stages else None
    return found.line() if found is not None and time.monotonic() - found.began > SILENT_SECONDS else ""


class ProgressLine:
    """Watches how long a command has been silent, and writes the line of its stage."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.pid = out, os.getpid()
        self.is_terminal = out.isatty()
        self.is_drawn, self.in_line = False, False
        """In the middle of a line of the command's own, such as a prompt, nothing is drawn."""
        self.paused, self.without_fallback = 0, 0
        self.said_at = time.monotonic()
        """When the command last wrote something itself."""
        self.shown_at = 0.0
        self.lock = threading.RLock()
        self.ended = threading.Event()

    def watch(self) -> None:
        """Until it ends: look, and write when it is time."""
        while not self.ended.wait(_LOOK_SECONDS):
            with self.lock, suppress(OSError, ValueError, IndexError):
                self.look()

    def look(self) -> None:
        """Write the line if the command has been silent for long enough."""
        now, innermost = time.monotonic(), _stages[-1] if _stages else None
        if self.paused or (innermost is None and self.without_fallback):
            self._clear()
            return
        if self.is_terminal:
            if self.is_drawn or (now - self.said_at >= SILENT_SECONDS and not self.in_line):
                self._draw(self._line(innermost))
            return
        since = now - max(self.said_at, self.shown_at)
        grown = SHARE * (now - (innermost.began if innermost is not None else self.said_at))
        wait = max(LINE_SECONDS, grown) if self.shown_at > self.said_at else SILENT_SECONDS_IN_FILES
        if since >= wait:
            self.shown_at = now
            self.out.write(self._line(innermost) + "\n")
            self.out.flush()

    def erase(self, text: str = "") -> None:
        """Something else is about to be written."""
        if os.getpid() != self.pid:
            return
        with self.lock:
            self.said_at = time.monotonic()
            self.in_line = text[-1] != "\n" if text else self.in_line
            with suppress(OSError, ValueError):
                self._clear()

    def _clear(self) -> None:
        if self.is_drawn:
            self.is_drawn = False
            self.out.write(_ERASE)
            self.out.flush()

    def _line(self, innermost: Stage | None) -> str:
        """Work without a name has at least its time."""
        return (innermost or Stage("still working" if _known else "starting up", began=self.said_at)).line()

    def _draw(self, line: str) -> None:
        self.is_drawn = True
        self.out.write(_ERASE + fitted(line, _width(self.out) - 1))
        self.out.flush()


_shown: list[ProgressLine] = []
"""The one of this process, while a command shows its stages."""


@contextmanager
def showing(out: TextIO | None = None) -> Iterator[None]:
    """While open, stages are shown on `out` (default standard error): for a program's entry point, on its first rank."""
    if _shown or os.environ.get(SWITCH, "").lower() in ("off", "0") or os.environ.get("RANK", "0") != "0":
        yield
        return
    line = ProgressLine(unfiltered(out or sys.stderr))
    _shown.append(line)
    before_output.append(line.erase)
    threading.Thread(target=line.watch, name="progress", daemon=True).start()
    try:
        yield
    finally:
        line.ended.set()
        line.erase()
        before_output.remove(line.erase)
        _shown.remove(line)


@contextmanager
def paused() -> Iterator[None]:
    """While open, another display draws on the terminal, or another process speaks."""
    lines = list(_shown)
    for line in lines:
        line.erase()
        line.paused += 1
    try:
        yield
    finally:
        for line in lines:
            line.paused -= 1


@contextmanager
def without_fallback() -> Iterator[None]:
    """While open, the command says itself how far it is: only stages are shown, no line for work without a name."""
    lines = list(_shown)
    for line in lines:
        line.without_fallback += 1
    try:
        yield
    finally:
        for line in lines:
            line.without_fallback -= 1


def fitted(line: str, width: int) -> str:
    """The line, cut to cells of a terminal; Chinese characters take two."""
    cells = 0
    for at, character in enumerate(line):
        cells += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if cells > width:
            return line[:at]
    return line


def _width(out: TextIO) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
