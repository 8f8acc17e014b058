"""Measured tables in the terminal: aligned with Chinese text too, plain when piped, stacked when narrow."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from rich.cells import cell_len

from truebatch.html_repr import html_table
from truebatch.language.columns import align
from truebatch.language.console import one_line
from truebatch.language.translate import in_words


@dataclass(frozen=True, slots=True)
class Table:
    """A header and rows of text; the first column is the name of the row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def _repr_html_(self) -> str:
        return html_table(self.rows, header=self.header, title=self.title)


def figures_table(figures: Mapping[str, Any], *, title: str = "", name: str = "figure") -> Table:
    """A nested mapping as rows of dotted names and texts; None is omitted."""
    return Table((name, "value"), tuple((key, figure_text(value)) for key, value in flat(figures)), title)


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested mapping, without what is None."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value


def figure_text(value: Any) -> str:
    """Four significant digits with thousands separators; two values are a range, more a list."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        texts = [figure_text(one) for one in value]
        return f"{texts[0]} to {texts[1]}" if len(texts) == 2 else ", ".join(texts)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def print_table(table: Table, *, file: TextIO | None = None) -> None:
    """Write the table, or one block per row if the terminal is too narrow for it.

    Terminal control characters are removed: a name or an answer may contain anything.
    """
    out = file or sys.stdout
    for line in render_table(_plain(_in_words(table)), width=terminal_width(out)):
        out.write(line + "\n")


def _in_words(table: Table) -> Table:
    """In the language of the person; a one-word value may be a name to type, and is not translated."""
    rows = tuple(tuple(in_words(cell) if " " in cell else cell for cell in row) for row in table.rows)
    return Table(tuple(map(in_words, table.header)), rows, in_words(table.title))


def render_table(table: Table, *, width: int) -> list[str]:
    """The lines of the table, none wider than `width` cells of the terminal unless a single value is."""
    title = [table.title] if table.title else []
    lines = align(table.rows, header=table.header)
    is_wide = max(map(cell_len, lines)) > width
    return [*title, *(_stacked(table) if is_wide else lines)]


def terminal_width(file: TextIO) -> int:
    """Columns of the terminal; output into a pipe or file is as wide as it needs unless COLUMNS says otherwise."""
    if not file.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return 1000
    return shutil.get_terminal_size().columns


def _plain(table: Table) -> Table:
    rows = tuple(tuple(one_line(cell) for cell in row) for row in table.rows)
    return Table(tuple(one_line(cell) for cell in table.header), rows, one_line(table.title))


def _stacked(table: Table) -> list[str]:
    lines = []
    for row in table.rows:
        lines.append(row[0])
        lines += [f"  {name}: {text}" for name, text in zip(table.header[1:], row[1:], strict=True)]
    return lines
