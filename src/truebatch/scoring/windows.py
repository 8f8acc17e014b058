"""Inputs of any length: planned and judged in windows, each a run folder of its own, so that memory holds one window.

run/ is the first window; run/window-000001/ and so on are the next, with a plan, a list and a journal of their own.
Samples of equal content are judged once a window; a plan is longest first inside a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from truebatch.errors import CheckpointError, ConfigError, RunError
from truebatch.io.atomic_files import read_json, write_json
from truebatch.progress import counted
from truebatch.scoring.gc_pause import without_collecting
from truebatch.scoring.store.input_index import InputSample, iter_samples

WINDOW = 100_000
"""Samples of a window; what is not longer has one."""
WINDOWS = "windows.json"
_MOST_BYTES = 1 << 16


def iter_windows(source: Path | str | Iterable[Any], size: int) -> Iterator[list[InputSample]]:
    """The samples of a source, `size` at a time, each with its place in the whole."""
    if size < 1:
        raise ConfigError("a window holds at least one sample", seen=f"window={size}", do="give 1 or more")
    listed = iter_samples(source)
    is_open = True
    while is_open:
        with without_collecting():
            window = list(counted(islice(listed, size), "reading samples"))
        is_open = bool(window)
        if is_open:
            yield window
        del window  # before the next is read: memory holds one


def window_folder(run: Path, number: int) -> Path:
    """The run folder of a window."""
    return run if number == 0 else run / f"window-{number:06d}"


def window_folders(run: Path) -> list[Path]:
    """The folders of all windows of a run, in order; a run that is not cut has one."""
    return [window_folder(run, number) for number in range(_known(run).get("windows", 1))]


def note_window(run: Path, number: int, size: int) -> None:
    """Note that a window is begun. Another size would cut the samples elsewhere and lose what was done: it is refused."""
    known = _known(run)
    if known and known["size"] != size:
        raise RunError(
            f"the run {run} was cut into other windows",
            seen=f"{known['size']:,} samples a window, now {size:,}",
            do=f"use --window {known['size']}, or name another run folder with --out",
        )
    if number >= known.get("windows", 1):
        write_json(run / WINDOWS, {"windows": number + 1, "size": size})


def end_windows(run: Path, number: int, size: int) -> None:
    """Note how many windows there are, when the last is judged; data may have become shorter."""
    if _known(run).get("windows", 1) != number:
        write_json(run / WINDOWS, {"windows": number, "size": size})


def window_size(run: Path) -> int:
    """Samples of a window of this run."""
    return _known(run).get("size", WINDOW)


def _known(run: Path) -> dict[str, int]:
    path = run / WINDOWS
    if not path.is_file():
        return {}
    found = read_json(path, max_bytes=_MOST_BYTES)
    begun = sum(1 for _ in run.glob("window-*")) + 2  # the first has no folder of its own, the newest perhaps not yet
    is_right = isinstance(found, dict) and set(found) == {"windows", "size"} and all(map(_is_count, found.values()))
    if not is_right or found["windows"] > begun:
        raise CheckpointError(
            f"{path} does not have the expected content",
            seen=f"{str(found)[:100]}; at most {begun:,} windows are begun in this folder",
            do="restore the file from a backup",
        )
    return dict(found)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
