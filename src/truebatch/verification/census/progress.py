"""How far a long measurement is: a bar on a terminal, a plain line a result otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from truebatch.language.console import one_line, unfiltered

Tell = Callable[[str], None]
"""Say what has just been finished."""


@contextmanager
def progress(total: int, what: str, *, file: TextIO | None = None) -> Iterator[Tell]:
    """While open, every call counts one more of `total` as done."""
    out = file or sys.stderr
    bar = _bar(out) if out.isatty() else None
    if bar is None:
        yield _lines(total, out)
        return
    with bar:
        job = bar.add_task(what, total=total)
        yield lambda text: bar.update(job, advance=1, description=f"{what}: {one_line(text)}")


def _lines(total: int, out: TextIO) -> Tell:
    done = 0

    def tell(text: str) -> None:
        nonlocal done
        done += 1
        out.write(f"[{done}/{total}] {one_line(text)}\n")
        out.flush()

    return tell


def _bar(out: TextIO) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:  # a bar is a comfort; lines say the same
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=Console(file=unfiltered(out)), transient=True)
