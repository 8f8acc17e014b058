"""`metrics.jsonl`: one JSON object a line, in step with the checkpoints.

Opening it at a step removes what a killed process wrote after that step, so a resumed log equals an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truebatch.errors import DataError, RunError
from truebatch.io.atomic_files import storage_error, write_bytes
from truebatch.io.text_encoding import MAX_LINE_BYTES, bounded_lines, open_file
from truebatch.testing.failpoints import failpoint

NONFINITE = "nonfinite"
_Line = tuple[bytes | None, dict[str, Any] | None]
"""The bytes of a line, None if it is too long to be one; its values, None if it has none."""


@dataclass(slots=True)
class MetricsLog:
    """An open log; made by `open_metrics`."""

    path: Path
    handle: int
    num_cut: int = 0
    """Lines of later steps, or torn ones, that were removed when the log was opened."""
    damage: tuple[str, ...] = ()
    """Words for lines that were no record though they were whole; a kill leaves none of these."""
    is_closed: bool = field(default=False, init=False)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line. NaN and infinity become null, and their names are listed under `nonfinite`."""
        line = (metrics_line(step, values) + "\n").encode()
        before = os.fstat(self.handle).st_size
        try:
            half = os.write(self.handle, line[: len(line) // 2])
            failpoint("metrics.half_written")
            while half < len(line):
                half += os.write(self.handle, line[half:])
            failpoint("metrics.written")
        except OSError as error:
            os.ftruncate(self.handle, before)
            raise storage_error(RunError, error, what=self.path.name, folder=self.path.parent) from error

    def sync(self) -> None:
        """Put the lines onto the disk; to be called before the checkpoint of the same step is saved."""
        try:
            os.fsync(self.handle)
            failpoint("metrics.synced")
        except OSError as error:
            raise storage_error(RunError, error, what=self.path.name, folder=self.path.parent) from error

    def cut_after(self, step: int) -> None:
        """Remove the lines of later steps from the open log, because the run was rolled back to `step`."""
        os.close(self.handle)
        self.is_closed = True
        again = open_metrics(self.path, step=step)
        self.handle, self.num_cut, self.is_closed = again.handle, self.num_cut + again.num_cut, False

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            os.close(self.handle)


def open_metrics(path: Path, *, step: int | None = None) -> MetricsLog:
    """Open the log to go on after `step` (that of the loaded checkpoint; None for a run from the beginning).

    Lines of later steps and a torn last line are removed first. Only the owner of the run may call this.
    """
    try:
        num_cut, damage = _cut(path, step)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise storage_error(RunError, error, what=path.name, folder=path.parent) from error
    return MetricsLog(path, handle, num_cut, damage)


def metrics_line(step: int, values: Mapping[str, Any]) -> str:
    """The JSON text of one line, the step first; tensors and NumPy numbers become plain numbers."""
    bad: list[str] = []
    plain = {name: _plain(name, value, bad) for name, value in values.items()}
    return json.dumps({"step": step, **plain, **({NONFINITE: bad} if bad else {})}, allow_nan=False)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a log as dictionaries; a torn last line is left out, any other that is none raises `DataError`."""
    if not path.exists():
        return []
    lines = _lines(path)
    for number, (line, values) in enumerate(lines, start=1):
        if values is None and not _is_torn(lines, number):
            raise DataError(
                f"{path} is damaged in line {number}",
                seen=_shown(line),
                do="restore it from a copy; a run that is resumed removes the line, and keeps the original file",
            )
    return [values for _, values in lines if values is not None]


def find_gaps(path: Path, *, step: int) -> str:
    """Which of the steps 1 to `step` have no line in the log of a run, in words; empty when all have one."""
    found = {
        values["step"]
        for _, values in (_lines(path) if path.exists() else ())
        if values is not None and ("loss" in values or "passed_over" in values)
    }
    missing = [at for at in range(1, step + 1) if at not in found]
    shown = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5:,} more" if len(missing) > 5 else "")
    return f"{len(missing):,} of {step:,} steps have no line in {path.name}: {shown}" if missing else ""


def _plain(name: str, value: Any, bad: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", one, bad) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}.{i}", one, bad) for i, one in enumerate(value)]
    if not isinstance(value, int | float | str | None) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(name)
        return None
    if value is not None and not isinstance(value, bool | int | float | str):
        raise RunError(
            f"the metric {name!r} cannot be logged",
            seen=f"a {type(value).__name__}: {str(value)[:60]!r}",
            do="log numbers, text, and lists or dictionaries of them",
        )
    return value


def _cut(path: Path, step: int | None) -> tuple[int, tuple[str, ...]]:
    if not path.exists():
        return 0, ()
    lines = _lines(path)
    kept = [line for line, values in lines if values is not None and step is not None and values["step"] <= step]
    if len(kept) == len(lines):
        return 0, ()
    damage = _damage(path, lines) if step is not None else ()
    failpoint("metrics.before_cut")
    # The whole file is replaced: a cut in place could be torn by the next kill.
    write_bytes(path, b"".join(line for line in kept if line is not None))
    failpoint("metrics.cut")
    return len(lines) - len(kept), damage


def _damage(path: Path, lines: Sequence[_Line]) -> tuple[str, ...]:
    """Words for the lines that no kill explains. The log as it was is kept under another name before they go."""
    bad = [n for n, (_, values) in enumerate(lines, start=1) if values is None and not _is_torn(lines, n)]
    if not bad:
        return ()
    number = 1
    while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    shutil.copyfile(path, kept)
    return tuple(
        f"line {n} of {path.name} is damaged ({_shown(lines[n - 1][0])}): left out; the file as it was is {kept.name}"
        for n in bad
    )


def _is_torn(lines: Sequence[_Line], number: int) -> bool:
    """The last line, without its end: a killed process wrote it."""
    line = lines[number - 1][0]
    return number == len(lines) and line is not None and not line.endswith(b"\n")


def _shown(line: bytes | None) -> str:
    return f"more than {MAX_LINE_BYTES:,} bytes" if line is None else repr(line[:60].decode(errors="replace"))


def _lines(path: Path) -> list[_Line]:
    with open_file(path) as file:
        return [(line, _parse(line)) for line in bounded_lines(file)]


def _parse(line: bytes | None) -> dict[str, Any] | None:
    if line is None or not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None
