"""How far a census is: its stage on a terminal, a plain line a result otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from truebatch.language.console import one_line
from truebatch.progress import stage

Tell = Callable[[str], None]
"""Say what has just been finished."""


@contextmanager
def progress(total: int, what: str, *, file: TextIO | None = None) -> Iterator[Tell]:
    """While open, every call counts one more of `total` as done."""
    out, done = file or sys.stderr, 0
    with stage(what, total) as examining:

        def tell(text: str) -> None:
            nonlocal done
            done += 1
            examining.advance()
            examining.what = f"{what}, last {one_line(text)}"
            if not out.isatty():
                out.write(f"[{done}/{total}] {one_line(text)}\n")
                out.flush()

        yield tell
