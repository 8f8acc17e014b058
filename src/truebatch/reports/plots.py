"""Plots as SVG text: curves, heat maps, bars and histograms in one style, for reports and run folders.

matplotlib is an extra and is imported when a picture is drawn. Text stays text, so that every writing system can be
shown.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from truebatch.errors import ConfigError

COLOURS = ("#2f6fb2", "#d1662b", "#3c8d57", "#8a5bb0", "#b8a02c", "#c4486b", "#4aa3a8", "#7a7a7a")
FONTS = ("Noto Sans CJK SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei", "WenQuanYi Zen Hei", "DejaVu Sans")
_INK = "#7d8590"
"""Readable on light and dark backgrounds; the background itself is transparent."""
_SIZE = (6.4, 3.6)

FEW = 12
"""Points of a curve below which each is marked: one alone would not be seen."""

MANY = 60
"""Points from which on a curve may be smoothed."""

Points = tuple[Sequence[float], Sequence[float]]


def curves(
    lines: Mapping[str, Points],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: Mapping[str, float] = {},
    smooth: bool = False,
) -> str:
    """Lines over one axis, by name. Points that are not finite are left out; `marks` are vertical lines with a name.

    The first line is drawn widest, so that it stays visible under an equal one. `smooth` draws the values of long lines
    faintly, and a moving average over them.
    """
    with _figure(title, x, y) as (axes, finished):
        for number, (name, points) in enumerate(lines.items()):
            xs, ys = _finite(points)
            width = 3.2 if number == 0 and len(lines) > 1 else 1.5
            style = "-" if number % 2 == 0 else "--"
            marker = "o" if len(xs) < FEW else ""
            colour = COLOURS[number % len(COLOURS)]
            if smooth and len(xs) >= MANY:
                axes.plot(xs, ys, color=colour, linewidth=1, alpha=0.25)
                ys = moving_average(ys)
            axes.plot(
                xs, ys, style, color=colour, linewidth=width, marker=marker, markersize=4, label=_plain(name)
            )  # fmt: skip
        for name, place in marks.items():
            axes.axvline(place, color=_INK, linestyle=":", linewidth=1)
            axes.annotate(_plain(name), (place, 1), xycoords=("data", "axes fraction"), fontsize=9, color=_INK)
        if log_y:
            _logarithms(axes)
        if log_x:
            _powers_of_two(axes, [place for xs, _ in lines.values() for place in xs])
        elif all(float(place).is_integer() for xs, _ in lines.values() for place in xs):
            axes.locator_params(axis="x", integer=True)
        _legend(axes, len(lines))
    return finished[0]


def dots(points: Mapping[str, Points], *, title: str, x: str, y: str) -> str:
    """The first series as points, the others as lines: measurements and fitted curves."""
    with _figure(title, x, y) as (axes, finished):
        for number, (name, pair) in enumerate(points.items()):
            xs, ys = _finite(pair)
            style = (
                {"marker": "o", "linestyle": ""} if number == 0 else {"marker": "x", "linestyle": "--", "linewidth": 1}
            )
            axes.plot(xs, ys, **style, color=COLOURS[number % len(COLOURS)], label=_plain(name))
        _legend(axes, len(points))
    return finished[0]


def bars(values: Mapping[str, float], *, title: str, y: str) -> str:
    """One bar per name, labelled with its value."""
    with _figure(title, "", y) as (axes, finished):
        names = [_plain(name) for name in values]
        drawn = axes.bar(range(len(names)), list(values.values()), color=COLOURS[0])
        axes.bar_label(drawn, fmt="{:.3g}", fontsize=10, color=_INK)
        axes.set_xticks(range(len(names)), names, rotation=20 if len(names) > 5 else 0)
    return finished[0]


def histogram(values: Sequence[float], *, title: str, x: str, y: str = "samples", bins: int = 40) -> str:
    """Histogram with `bins` equal ranges."""
    with _figure(title, x, y) as (axes, finished):
        axes.hist([value for value in values if math.isfinite(value)], bins=bins, color=COLOURS[0])
        axes.locator_params(axis="x", nbins=6)  # scores may need many digits
        axes.locator_params(axis="y", integer=True)
    return finished[0]


def histograms(values: Mapping[str, Sequence[float]], *, title: str, x: str, bins: int = 30) -> str:
    """Several histograms over the same ranges, as outlines on top of each other; shares, as their numbers may
    differ."""
    finite = {name: [one for one in all_ if math.isfinite(one)] for name, all_ in values.items()}
    every = [one for all_ in finite.values() for one in all_]
    low, high = min(every), max(every)
    edges = [low + (high - low or 1.0) * at / bins for at in range(bins + 1)]
    with _figure(title, x, "share of the samples") as (axes, finished):
        for number, (name, all_) in enumerate(finite.items()):
            colour = COLOURS[number % len(COLOURS)]
            shares = [1 / len(all_)] * len(all_)
            axes.hist(
                all_, bins=edges, weights=shares, histtype="step", linewidth=1.8, color=colour, label=_plain(name)
            )
        _legend(axes, len(finite))
    return finished[0]


def heat_map(
    values: Sequence[Sequence[float]],
    *,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    names: tuple[str, str] = ("", ""),
) -> str:
    """A table as colours, with the number in every cell of a small one; `names` are those of the columns and rows."""
    with _figure(title, names[0], names[1]) as (axes, finished):
        shown = axes.pcolormesh(values, cmap="viridis", edgecolors="none")  # Shapes: an image would be a data link.
        axes.invert_yaxis()
        axes.set_xticks([j + 0.5 for j in range(len(columns))], [_plain(c) for c in columns])
        axes.set_yticks([i + 0.5 for i in range(len(rows))], [_plain(r) for r in rows])
        axes.grid(visible=False)
        axes.figure.colorbar(shown, ax=axes).solids.set_rasterized(False)
        if len(rows) * len(columns) <= 150:
            _write_cells(axes, values)
    return finished[0]


def load_matplotlib() -> ModuleType:
    """matplotlib, drawing into memory; `ConfigError` with the command to install it where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib", seen=str(error), do="pip install 'truebatch[report]', or matplotlib itself"
        ) from error
    matplotlib.use("Agg")
    return matplotlib


@contextmanager
def _figure(title: str, x: str, y: str) -> Iterator[tuple[Any, list[str]]]:
    """Axes to draw on; the SVG is in the list after the block."""
    matplotlib = load_matplotlib()
    from matplotlib.figure import Figure

    finished: list[str] = []
    with matplotlib.rc_context(_look()):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        axes.set_title(_plain(title))
        axes.set_xlabel(_plain(x))
        axes.set_ylabel(_plain(y))
        yield axes, finished
        finished.append(_svg(figure))


def _look() -> dict[str, Any]:
    # `svg.hashsalt` and no date: so the same values give the same bytes.
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _INK)
    return ink | {
        "svg.fonttype": "none",
        "svg.hashsalt": "truebatch",
        "font.family": list(FONTS),
        "font.size": 11,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _INK,
        "grid.alpha": 0.25,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 12,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "text.parse_math": False,
    }


def _svg(figure: Any) -> str:
    held = io.StringIO()
    log = logging.getLogger("matplotlib.font_manager")
    before = log.level
    # A listed font that is not installed needs no warning: text stays text, and the viewer picks a font.
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
            figure.savefig(held, format="svg", metadata={"Date": None, "Creator": None})
    finally:
        log.setLevel(before)
    text = held.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL).strip() + "\n"


def _logarithms(axes: Any) -> None:
    """Powers of ten at equal distances, as plain numbers: formulas stay text here, and would be seen as they are."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _powers_of_two(axes: Any, places: Sequence[float]) -> None:
    """Doublings at equal distances, each named by its number."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    shown = sorted(set(places))
    axes.set_xticks(shown, [f"{place:g}" for place in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def moving_average(values: Sequence[float]) -> list[float]:
    """Exponential, over about a thirtieth of the values, without the pull towards its beginning.

    >>> moving_average([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    kept, total, weight, found = 1 - 1 / max(len(values) / 30, 1), 0.0, 0.0, []
    for value in values:
        total, weight = kept * total + value, kept * weight + 1
        found.append(total / weight)
    return found


def _legend(axes: Any, number: int) -> None:
    if number > 1:
        axes.legend(frameon=False, fontsize=10)


def _write_cells(axes: Any, values: Sequence[Sequence[float]]) -> None:
    flat = [value for row in values for value in row if math.isfinite(value)]
    middle = (max(flat) + min(flat)) / 2 if flat else 0.0
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            ink = "black" if math.isfinite(value) and value > middle else "white"
            axes.text(j + 0.5, i + 0.5, f"{value:.3g}", ha="center", va="center", fontsize=9, color=ink)


def _finite(points: Points) -> Points:
    kept = [(x, y) for x, y in zip(*points, strict=True) if math.isfinite(x) and math.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def _plain(text: str) -> str:
    """Text valid in XML: control characters become spaces."""
    return "".join(c if c.isprintable() else " " for c in text)[:200]
