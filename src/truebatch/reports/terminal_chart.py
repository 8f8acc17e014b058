"""Curves in a terminal, drawn with characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from truebatch.language.translate import in_words

MARKS = "ox+"
SHARED = "*"
"""Mark where several curves overlap."""


def draw_curves(curves: Mapping[str, Sequence[float]], *, width: int = 60, height: int = 10) -> list[str]:
    """Lines of text: each curve with its own mark, `*` where curves meet, the largest and smallest value beside.

    Curves are drawn over the number of the point, all on one scale; a curve of one point is drawn at the left.
    """
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    cells: dict[tuple[int, int], set[str]] = {}
    for name, curve in curves.items():
        for at, value in enumerate(curve):
            column = round(at * (width - 1) / max(len(curve) - 1, 1))
            row = round((high - value) * (height - 1) / ((high - low) or 1.0))
            cells.setdefault((row, column), set()).add(name)
    marks = dict(zip(curves, MARKS, strict=False))
    labels = {0: f"{high:7.3f}", height - 1: f"{low:7.3f}"}
    legend = ", ".join(f"{mark} {in_words(name)}" for name, mark in marks.items())
    drawn = [
        f"{labels.get(row, ''):>7} |" + "".join(_mark(cells.get((row, column)), marks) for column in range(width))
        for row in range(height)
    ]
    return [*(line.rstrip() for line in drawn), f"{'':9}{legend}, {SHARED} several"]


def _mark(names: set[str] | None, marks: Mapping[str, str]) -> str:
    if not names:
        return " "
    return SHARED if len(names) > 1 else marks[next(iter(names))]
