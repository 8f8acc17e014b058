"""Progress display of a run: a bar on a terminal, a few lines in a file, JSON for programs. Rank 0 only.

The number of plain lines grows with the logarithm of the time: a run of a week does not fill a disk.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from truebatch.language.console import shown, unfiltered
from truebatch.language.translate import in_words
from truebatch.progress import current_line, paused, without_fallback

LogFormat = Literal["auto", "plain", "json"]
FIRST_SECONDS = 5.0
"""Seconds between two plain lines at the beginning."""
SHARE = 0.1
"""Later, a line is printed when the run has grown by this share."""


WIDE = 100
"""Terminal width from which a bar is shown next to the numbers."""


class ConsoleLogger(Protocol):
    """A logger that shows a run to a person, and prints lines between."""

    def say(self, line: str) -> None:
        """One line of words."""
        ...

    def begin(self, step: int, num_steps: int) -> None:
        """The run begins after `step`."""
        ...

    def record(self, record: Mapping[str, Any]) -> None:
        """A step was done, or the model was validated."""
        ...

    def close(self) -> None:
        """The run is over; the last step is shown."""
        ...


def make_console_logger(log_format: LogFormat = "auto", *, file: TextIO | None = None) -> ConsoleLogger:
    """A bar where the output is a terminal, plain lines elsewhere; JSON lines on request."""
    out = file or sys.stdout
    if log_format == "json":
        return JsonLines(out)
    return TerminalBar(out) if log_format == "auto" and out.isatty() else PlainLines(out)


class Pace:
    """Position and speed of a run."""

    def __init__(self, step: int, num_steps: int) -> None:
        self.first, self.step, self.num_steps = step, step, num_steps
        self.tokens, self.seconds = 0, 0.0
        self.last: Mapping[str, Any] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in the record of a step."""
        self.step, self.last = int(record["step"]), record
        self.tokens += int(record["tokens"])
        self.seconds += float(record["seconds"])

    def words(self, *, is_short: bool = False) -> str:
        """Loss, tokens per second, fill, memory and time left, of the last step and the run so far."""
        parts = [f"loss {self.last['loss']:.4f}"]
        if self.tokens:
            speed = self.tokens / max(self.seconds, 1e-9)
            parts += [f"{speed:,.0f} tokens/s", f"fill {self.last['fill']:.0%}"]
        memory = f"{memory_bytes() / 2**30:.1f} GiB"
        parts += [memory if is_short else f"memory {memory}", f"ETA {self.eta()}"]
        return "  ".join(parts)

    def eta(self) -> str:
        """Time left at the pace so far, as hours:minutes:seconds."""
        each = self.seconds / max(self.step - self.first, 1)
        return str(timedelta(seconds=math.ceil(each * max(self.num_steps - self.step, 0))))


def memory_bytes() -> int:
    """Peak accelerator memory of this process; without one, its memory in use."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return int(psutil.Process().memory_info().rss)


def peak_memory_bytes() -> int:
    """Most memory this process has held so far: of the GPU it uses, else of the machine."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except (OSError, StopIteration):  # Not Linux.
        return int(psutil.Process().memory_info().rss)


def _write_line(out: TextIO, line: str) -> None:
    try:
        out.write(line + "\n")
        out.flush()
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. The run continues: metrics.jsonl has every step.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


class PlainLines:
    """Lines for a file or a pipe: often at first, ever more rarely later, always the last step."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.out, self.clock = out, clock
        self.pace = Pace(0, 0)
        self.began = self.shown_at = clock()
        self.shown_step = -1
        self.beside = ExitStack()
        """Open while steps are counted here, and not by the line of stages."""

    def say(self, line: str) -> None:
        """One line of words."""
        _write_line(self.out, shown(in_words(line)))

    def begin(self, step: int, num_steps: int) -> None:
        """The run begins after `step`."""
        self.pace = Pace(step, num_steps)
        self.began = self.shown_at = self.clock()
        self.beside.enter_context(without_fallback())

    def record(self, record: Mapping[str, Any]) -> None:
        """Print a line if the last one is long enough ago."""
        if "tokens" not in record:
            return
        self.pace.add(record)
        now = self.clock()
        is_first = self.pace.step == self.pace.first + 1
        if is_first or now - self.shown_at >= max(FIRST_SECONDS, SHARE * (now - self.began)):
            self._show(now)

    def close(self) -> None:
        """The last step, unless it was printed already."""
        self.beside.close()
        if self.pace.last and self.shown_step != self.pace.step:
            self._show(self.clock())

    def _show(self, now: float) -> None:
        self.shown_at, self.shown_step = now, self.pace.step
        self.say(f"step {self.pace.step}/{self.pace.num_steps}  {self.pace.words()}")


class TerminalBar:
    """One updating line below the messages; it fits into 80 columns."""

    def __init__(self, out: TextIO) -> None:
        self.console = Console(file=unfiltered(out), highlight=False, markup=False)
        self.bar: Progress | None = None
        self.task = TaskID(0)
        self.pace = Pace(0, 0)
        self.beside = ExitStack()

    def say(self, line: str) -> None:
        """One line of words, above the bar."""
        self.console.print(shown(in_words(line)), soft_wrap=True)

    def begin(self, step: int, num_steps: int) -> None:
        """Draw the bar."""
        self.pace = Pace(step, num_steps)
        bar = [BarColumn(12)] if self.console.width >= WIDE else []
        columns = (TextColumn("step {task.completed}/{task.total}"), *bar, _NumbersOrStage())
        self.bar = Progress(*columns, console=self.console, refresh_per_second=5)
        self.task = self.bar.add_task("", total=num_steps, completed=step)
        self.beside.enter_context(paused())
        self.bar.start()

    def record(self, record: Mapping[str, Any]) -> None:
        """Move the bar."""
        if self.bar is not None and "tokens" in record:
            self.pace.add(record)
            self.bar.update(self.task, completed=self.pace.step, description=in_words(self.pace.words(is_short=True)))

    def close(self) -> None:
        """Leave the last state of the bar on the terminal."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
            self.beside.close()


class _NumbersOrStage(ProgressColumn):
    """The numbers of the last step; while something else takes long, such as validation, what that is."""

    def render(self, task: Task) -> Text:
        """What stands behind the bar."""
        return Text(current_line() or task.description, no_wrap=True, overflow="ellipsis")


class JsonLines:
    """One JSON object per line, for programs: every record, and messages as `message`. NaN becomes null."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.beside = ExitStack()

    def say(self, line: str) -> None:
        """A line of words as {"message": ...}."""
        self._write({"message": line})

    def begin(self, step: int, num_steps: int) -> None:
        """Where the run begins and how long it is."""
        self._write({"begin": step, "num_steps": num_steps})
        self.beside.enter_context(without_fallback())

    def record(self, record: Mapping[str, Any]) -> None:
        """A record as in metrics.jsonl, plus the memory in use."""
        self._write({**record, "memory_bytes": memory_bytes()})

    def close(self) -> None:
        """Nothing is left to be shown."""
        self.beside.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        _write_line(self.out, shown(json.dumps(plain, ensure_ascii=False, allow_nan=False)))
