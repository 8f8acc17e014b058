"""`truebatch watch`: runs as they go, side by side in the terminal, read from their folders only.

A terminal gets one table that is drawn anew; a file or a pipe gets a line whenever a run has moved.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from truebatch.errors import TruebatchError
from truebatch.language.console import one_line, unfiltered
from truebatch.language.translate import in_words
from truebatch.progress import paused
from truebatch.reports.report import check_names
from truebatch.reports.sections.scores import is_scoring_run
from truebatch.reports.tables import Table, print_table
from truebatch.scoring.store.export import read_status as read_scoring_status
from truebatch.training.run_dir.run_dir import METRICS, read_status

LAST_STEPS = 50
"""Steps that speed and time left are told by."""
EVERY_SECONDS = 2.0
MOST_BYTES = 8 << 20
"""Of a log, read at once."""
MOST_STEPS = 1 << 53
MOST_FAILURES = 5
"""A folder that could not be read so often in a row is watched no longer."""
MOST_LEFT = timedelta(days=3650)
HEADER = ("run", "state", "done", "loss", "speed", "fill", "time left", "equality")


class LogTail:
    """The last records of a log that is being written; every byte is read once."""

    def __init__(self, path: Path) -> None:
        self.path, self.read = path, 0
        self.records: deque[Mapping[str, Any]] = deque(maxlen=LAST_STEPS)

    def update(self) -> None:
        """Take in what was written since; a log that became shorter is read anew. A torn last line waits for its end.

        Of a log that grew by more than `MOST_BYTES` only the end is read: it holds more steps than are shown.
        """
        if not self.path.is_file():
            return
        size = self.path.stat().st_size
        if size < self.read:
            self.read = 0
            self.records.clear()
        is_skipped = size - self.read > MOST_BYTES
        with self.path.open("rb") as file:
            file.seek(size - MOST_BYTES if is_skipped else self.read)
            whole, newline, _torn = file.read(MOST_BYTES).rpartition(b"\n")
        self.read = (size - MOST_BYTES if is_skipped else self.read) + len(whole) + len(newline)
        lines = whole.splitlines()[is_skipped:]  # the first of a skipped log is the end of a line
        self.records.extend(found for line in lines if (found := _step_record(line)) is not None)


def _step_record(line: bytes) -> dict[str, Any] | None:
    """The record of a step; None for another record, and for a damaged line, which `report` names."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_step = isinstance(found, dict) and _whole(found.get("step")) is not None and "tokens" in found
    return found if is_step else None


def _whole(value: object) -> int | None:
    """A number of steps; None for what is none."""
    return value if isinstance(value, int) and 0 <= value < MOST_STEPS else None


def _real(value: object) -> float | None:
    """A finite number; None for what is none."""
    if not isinstance(value, int | float) or not -1e300 < value < 1e300:  # NaN is in no interval
        return None
    return float(value)


class RunWatch:
    """One run: what its row says now."""

    def __init__(self, run: Path, name: str) -> None:
        self.run, self.name, self.tail = run, name, LogTail(run / METRICS)
        self.is_running, self.failures = True, 0

    def row(self) -> tuple[str, ...]:
        """The cells of its row; a folder that cannot be read now says why instead."""
        try:
            found = self._scoring_row() if is_scoring_run(self.run) else self._training_row()
            self.failures = 0
            return found
        except TruebatchError as error:
            self.failures += 1
            self.is_running = self.failures < MOST_FAILURES
            return (self.name, in_words(error.wrong), *("" for _ in HEADER[2:]))

    def _training_row(self) -> tuple[str, ...]:
        self.tail.update()
        status, records = read_status(self.run), list(self.tail.records)
        state = status.get("state")
        self.is_running = state in ("new", "running")
        last: Mapping[str, Any] = records[-1] if records else status
        step, number = _whole(last.get("step")) or 0, _whole(status.get("num_steps"))
        seconds, tokens = (_total(records, key) for key in ("seconds", "tokens"))
        left = seconds / len(records) * (number - step) if records and number is not None else None
        return (
            self.name,
            in_words(state[:40]) if isinstance(state, str) else "-",
            f"{step:,}/{number:,}" if number is not None else f"{step:,}",
            _number(last.get("loss"), "{:.4f}"),
            _number(tokens / seconds, "{:,.0f} tokens/s") if seconds > 0 else "-",
            _number(last.get("fill"), "{:.0%}"),
            _time(left) if left is not None and self.is_running else "-",
            _equality(status.get("equality")),
        )

    def _scoring_row(self) -> tuple[str, ...]:
        found = read_scoring_status(self.run)
        done = found.ok + found.failed
        self.is_running = found.pending > 0
        rate = done / found.seconds if found.seconds else 0.0
        left = _time(found.pending / rate) if rate and found.pending else "-"
        state = in_words("done") if not found.pending else f"{found.failed:,} failed" if found.failed else "-"
        return (self.name, state, f"{done:,}/{found.samples:,}", "-", f"{rate:,.1f}/s", "-", left, "-")


def watch_runs(runs: Sequence[Path], out: TextIO, *, seconds: float = EVERY_SECONDS) -> None:
    """Show runs until none of them is going on."""
    watched = [RunWatch(run, name) for run, name in zip(runs, check_names(runs), strict=True)]
    with paused():
        if out.isatty():
            _draw(watched, out, seconds)
        else:
            _write(watched, out, seconds)


def _draw(watched: Sequence[RunWatch], out: TextIO, seconds: float) -> None:
    with Live(console=Console(file=unfiltered(out), highlight=False), auto_refresh=False) as live:
        while True:
            live.update(Text(_table(watched)), refresh=True)
            if not any(one.is_running for one in watched):
                return
            time.sleep(seconds)


def _write(watched: Sequence[RunWatch], out: TextIO, seconds: float) -> None:
    shown: dict[str, tuple[str, ...]] = {}
    while True:
        for one in watched:
            row = one.row()
            if shown.get(one.name) != row:
                shown[one.name] = row
                out.write(_line(row) + "\n")
        out.flush()
        if not any(one.is_running for one in watched):
            return
        time.sleep(seconds)


def _line(row: tuple[str, ...]) -> str:
    named = [(name, cell) for name, cell in zip(HEADER, row, strict=True) if cell not in ("", "-")]
    return "  ".join(one_line(f"{in_words(name)} {cell}") for name, cell in named)


def _table(watched: Sequence[RunWatch]) -> str:
    held = io.StringIO()
    print_table(Table(HEADER, tuple(one.row() for one in watched)), file=held)
    return held.getvalue().rstrip("\n")


def _total(records: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(value for record in records if (value := _real(record.get(key))) is not None)


def _number(value: object, form: str) -> str:
    known = _real(value)
    return "-" if known is None else form.format(known) if abs(known) < 1e12 else f"{known:.3g}"


def _time(seconds: float) -> str:
    """Days and hh:mm:ss; a dash for longer than anybody waits."""
    return str(timedelta(seconds=math.ceil(max(seconds, 0.0)))) if seconds < MOST_LEFT.total_seconds() else "-"


def _equality(found: object) -> str:
    verdict = found.get("verdict") if isinstance(found, Mapping) else None
    return in_words(verdict[:40].replace("_", " ")) if isinstance(verdict, str) else "-"
