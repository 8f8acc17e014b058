"""Columns of text that line up in a terminal and in a file: rich measures them, nothing is coloured or broken into lines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

GAP = 2
_ENDLESS = 1_000_000


def align(
    rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), others: Literal["left", "right"] = "right"
) -> list[str]:
    """A line for each row, the first column to the left and all `others` to the right; a rule under the header.

    >>> align([("one", "1"), ("two", "20")])
    ['one   1', 'two  20']
    """
    if not rows and not header:
        return []
    num = len(header or rows[0])
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0), collapse_padding=True)
    for column in range(num):
        table.add_column(justify=others if column else "left", no_wrap=True, overflow="crop")
    if header:
        table.add_row(*map(Text, header))
        table.add_row(*(Rule(characters="-", style="") for _ in header))
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(file=out, width=_ENDLESS, color_system=None, force_terminal=False, highlight=False, markup=False)
    console.width = max(1, Measurement.get(console, console.options, table).maximum)
    console.print(table)
    return [line.rstrip() for line in out.getvalue().split("\n")[:-1]]
