"""The results of `fit`, saved as fit.json in the run folder: points and line, batch sizes, speed and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.atomic_files import read_json
from truebatch.reports.page import Drawing, Section
from truebatch.reports.plots import curves, dots
from truebatch.reports.tables import Table
from truebatch.training.memory.cost_model import FIT, MemoryFit, load_fit

GIB = 2**30
_MOST_BYTES = 1 << 24


def sizes_table(values: Mapping[str, Any], *, title: str = "") -> Table:
    """Batch sizes with speed, memory and what fits where; the largest budget of cells last."""
    limits: Mapping[str, int] = values["limits"]
    header = ("batch size", "samples/s", "GiB, typical", "GiB, longest", *(_named(n, b) for n, b in limits.items()))
    rows = tuple(
        (
            str(size["samples"]), _speed(size), gib(size["typical_bytes"]), gib(size["worst_bytes"]),
            *("fits" if size["worst_bytes"] <= limit else "does not fit" for limit in limits.values()),
        )
        for size in values["sizes"]
    )  # fmt: skip
    budgets = (f"{cells:,}" if cells >= values["longest"] else "none" for cells in values["cells"].values())
    return Table(header, (*rows, ("largest budget, cells=", "", "", "", *budgets)), title)


def gib(num_bytes: int) -> str:
    """Bytes as GiB with four digits."""
    return f"{num_bytes / GIB:,.4g}" if num_bytes >= GIB // 1000 else "<0.001"


def prices_in_words(fit: MemoryFit) -> str:
    """Memory per cell, pair and sample; and per cell of other axes, if there are any."""
    cell, pair, sample = f"{fit.per_cell:,.0f}", f"{fit.per_pair:,.2f}", f"{fit.per_sample:,.0f}"
    if not any(point.others for point in fit.points):
        return f"a forward and backward pass adds {cell} bytes per cell, {pair} per pair, {sample} per sample"
    other, theirs, cross = f"{fit.per_other:,.0f}", f"{fit.per_other_pair:,.2f}", f"{fit.per_cross_pair:,.2f}"
    return (
        f"a forward and backward pass adds {cell} bytes per cell, {pair} per pair, {sample} per sample; for another axis "
        f"(such as targets) {other} per cell, {theirs} per pair, {cross} per pair across"
    )


def fit_sections(run: Path) -> Iterator[Section]:
    """The memory fit with its points; and by batch size, where that was measured too, speed and memory."""
    fit = load_fit(run)
    if fit is None:
        return
    points = sorted(fit.points, key=lambda point: point.cells)
    cells = [float(point.cells) for point in points]
    fitted = [fit.added(*point.shape) / GIB for point in points]
    words = [
        f"model, gradients and optimiser: {gib(fit.constant_bytes)} GiB",
        prices_in_words(fit),
        f"the line is off by at most {fit.uncertainty:.1%} on the points it was made from"
        + ("; no probe was run: estimated from shapes" if fit.is_estimate else ""),
    ]
    picture = partial(
        dots, {"measured": (cells, [point.num_bytes / GIB for point in points]), "fitted": (cells, fitted)},
        title="Memory a forward and backward pass adds", x="cells", y="GiB",
    )  # fmt: skip
    yield Section(title="Memory fit", words=words, tables=[_points_table(points, fitted)], drawn=[picture])
    yield from _size_sections(run)


def _points_table(points: Sequence[Any], fitted: Sequence[float]) -> Table:
    rows = tuple(
        (f"{p.cells:,}", f"{p.others:,}", f"{p.pairs:,}", f"{p.samples:,}", f"{p.num_bytes / GIB:.4g}", f"{line:.4g}")
        for p, line in zip(points, fitted, strict=True)
    )
    header = ("cells", "other cells", "pairs", "samples", "GiB measured", "GiB by the line")
    kept = [at for at, name in enumerate(header) if name != "other cells" or any(p.others for p in points)]
    return Table(tuple(header[at] for at in kept), tuple(tuple(row[at] for at in kept) for row in rows), "Points")


def _size_sections(run: Path) -> Iterator[Section]:
    values = read_json(run / FIT, max_bytes=_MOST_BYTES)
    if "sizes" not in values:
        return
    try:
        table, pictures = sizes_table(values), _size_pictures(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{run / FIT} does not hold batch sizes",
            seen=f"{type(error).__name__}: {error}",
            do="measure again with `truebatch fit`",
        ) from error
    yield Section(title="Speed and memory by batch size", tables=[table], drawn=pictures)


def _size_pictures(values: Mapping[str, Any]) -> list[Drawing]:
    sizes = values["sizes"]
    numbers = [float(size["samples"]) for size in sizes]
    memory = {
        "samples as they come": (numbers, [size["typical_bytes"] / GIB for size in sizes]),
        "the longest together": (numbers, [size["worst_bytes"] / GIB for size in sizes]),
    }
    timed = [size for size in sizes if size["samples_per_second"] is not None]
    own = [float(size["samples"]) for size in timed]
    speed = {
        "fastest pass": (own, [float(size["samples_per_second"]) for size in timed]),
        "slowest pass": (own, [float(size["slowest_per_second"]) for size in timed]),
    }
    named: dict[str, Any] = {"x": "batch size", "log_x": True}
    drawn: list[Drawing] = [partial(curves, memory, title="Memory by batch size", y="GiB", log_y=True, **named)]
    if timed:
        drawn.insert(0, partial(curves, speed, title="Speed by batch size", y="samples per second", **named))
    return drawn


def _speed(size: Mapping[str, Any]) -> str:
    low, high = size["slowest_per_second"], size["samples_per_second"]
    return "-" if low is None or high is None else f"{low:,.1f} to {high:,.1f}"


def _named(name: str, limit: int) -> str:
    return name if name.endswith("GiB") else f"{name} ({gib(limit)} GiB)"
