"""Measured tables in the terminal: aligned with Chinese text too, plain when piped, stacked when narrow."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len

GAP = "  "


@dataclass(frozen=True, slots=True)
class Table:
    """A header and rows of text; the first column is the name of the row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


def print_table(table: Table, *, file: TextIO | None = None) -> None:
    """Write the table as wide as it is, or as one block a row where the terminal is too narrow for it."""
    out = file or sys.stdout
    for line in render_table(table, width=terminal_width(out)):
        out.write(line + "\n")


def render_table(table: Table, *, width: int) -> list[str]:
    """The lines of the table, none wider than `width` cells of the terminal unless a single value is."""
    widths = [max(cell_len(row[i]) for row in (table.header, *table.rows)) for i in range(len(table.header))]
    title = [table.title] if table.title else []
    if sum(widths) + len(GAP) * (len(widths) - 1) > width:
        return title + _stacked(table)
    rule = GAP.join("-" * w for w in widths)
    return [*title, _line(table.header, widths), rule, *(_line(row, widths) for row in table.rows)]


def terminal_width(file: TextIO) -> int:
    """Columns of the terminal; output into a pipe or file is as wide as it needs unless COLUMNS says otherwise."""
    if not file.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return 1000
    return shutil.get_terminal_size().columns


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first = row[0] + " " * (widths[0] - cell_len(row[0]))
    rest = [" " * (w - cell_len(text)) + text for text, w in zip(row[1:], widths[1:], strict=True)]
    return GAP.join((first, *rest)).rstrip()


def _stacked(table: Table) -> list[str]:
    lines = []
    for row in table.rows:
        lines.append(row[0])
        lines += [f"  {name}: {text}" for name, text in zip(table.header[1:], row[1:], strict=True)]
    return lines
