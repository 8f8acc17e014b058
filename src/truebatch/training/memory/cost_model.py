"""Memory as a line with a floor: bytes = fixed + cells, pairs, samples and further cells, each at its price, and how sure
that is.

points -> prices that are never negative -> relative error of every point, also when it is left out -> largest budget

The largest budget of cells that is safe for the user's samples: by the plans that would be made under it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import CheckpointError, DataError
from truebatch.html_repr import html_table
from truebatch.io.atomic_files import read_json, write_json
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints, Layout

Floats = NDArray[np.float64]
FIT = "fit.json"
LEAST_UNCERTAINTY = 0.01
"""A line through as many points as it has prices looks perfect; nothing measured is."""
ABOVE_FLOOR, LARGE_SPANS, LEAST_POINTS = 3.0, (5.0, 2.5, 1.5), 6
"""Where the line is what shows: well above the floor, or near the largest; and how many points there must be for it."""


class MemoryShape(NamedTuple):
    """What the memory of a micro-batch depends on."""

    cells: int
    pairs: int
    samples: int
    others: int = 0
    """Cells along other axes than the planned one, such as the targets of an encoder-decoder."""
    other_pairs: int = 0
    """Pairs of theirs."""
    cross_pairs: int = 0
    """Pairs of one of them and one along the planned axis."""


@dataclass(frozen=True, slots=True)
class Point:
    """One micro-batch that was run, and the bytes its forward and backward added to what was there; flat, as it is kept."""

    cells: int
    pairs: int
    samples: int
    num_bytes: int
    others: int = 0
    other_pairs: int = 0
    cross_pairs: int = 0

    @classmethod
    def of(cls, shape: MemoryShape, num_bytes: int) -> Point:
        """What a micro-batch of this shape took."""
        return cls(num_bytes=num_bytes, **shape._asdict())

    @property
    def shape(self) -> MemoryShape:
        """What it was."""
        return MemoryShape(self.cells, self.pairs, self.samples, self.others, self.other_pairs, self.cross_pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFit:
    """What a micro-batch takes, for one model, precision, layout and kind of device."""

    points: tuple[Point, ...]
    floor: float
    """Bytes even the smallest micro-batch adds: gradients of tables, say, are as large as the table."""
    fixed: float
    per_cell: float
    per_pair: float
    per_sample: float
    uncertainty: float
    """The largest relative error of a point above the floor: of the line, or of the line without that point."""
    resident_bytes: int
    """Parameters, buffers and gradients: there all the time."""
    optimiser_bytes: int
    """What the optimiser holds after its first update."""
    facts: Mapping[str, Any]
    """What the numbers hold for; see `fit_memory`."""
    most_cells: int | None = None
    """No budget above this: a probe with little more ran out of memory."""
    is_estimate: bool = False
    """True if no probe was run: shapes without values went through the model."""
    samples_per_second: float | None = None
    """Of the fastest batch size, forward and backward alone, where it was timed."""
    per_other: float = 0.0
    """Bytes of a cell along another axis than the planned one."""
    per_other_pair: float = 0.0
    per_cross_pair: float = 0.0

    def added(self, *shape: int) -> float:
        """Bytes that forward and backward of a micro-batch add, without a margin; a `Shape`."""
        return max(self.floor, self.fixed + self.varying(*shape))

    def varying(self, *shape: int) -> float:
        """The part of the line that depends on the micro-batch."""
        return sum(price * number for price, number in zip(self.prices, shape, strict=False))  # what is absent is 0

    @property
    def prices(self) -> tuple[float, ...]:
        """Of every number of a shape."""
        own = (self.per_cell, self.per_pair, self.per_sample)
        return (*own, self.per_other, self.per_other_pair, self.per_cross_pair)

    def predict(self, *shape: int) -> int:
        """Bytes at the peak of a step with this micro-batch, model and optimiser included, without a margin."""
        return math.ceil(self.constant_bytes + self.added(*shape))

    def predict_safely(self, *shape: int) -> int:
        """As `predict`, with what a micro-batch adds raised by the uncertainty."""
        return math.ceil(self.constant_bytes + (1 + self.uncertainty) * self.added(*shape))

    @property
    def constant_bytes(self) -> int:
        """What is there whatever is run: model, gradients, optimiser."""
        return self.resident_bytes + self.optimiser_bytes

    @property
    def residuals(self) -> tuple[float, ...]:
        """Of every point: predicted over measured, minus 1."""
        return tuple(self.added(*p.shape) / max(p.num_bytes, 1) - 1 for p in self.points)

    @property
    def fingerprint(self) -> str:
        """Changes when a fact does."""
        return hashlib.blake2b(json.dumps(dict(self.facts), sort_keys=True).encode(), digest_size=16).hexdigest()

    def _repr_html_(self) -> str:
        header = ("cells", "pairs", "samples", "other cells", "their pairs", "cross pairs", "bytes measured", "off by")
        points = zip(self.points, self.residuals, strict=True)
        rows = [(*p.shape, p.num_bytes, f"{error:+.1%}") for p, error in points]
        title = f"{self.fixed:,.0f} bytes, {self.per_cell:,.1f} a cell, {self.per_pair:,.2f} a pair, +-{self.uncertainty:.1%}"
        return html_table(rows, header=header, title=title)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the residuals and the fingerprint beside."""
        return {**asdict(self), "facts": dict(self.facts), "residuals": self.residuals, "fingerprint": self.fingerprint}


def fit_points(
    points: Sequence[Point], *, resident_bytes: int, optimiser_bytes: int, facts: Mapping[str, Any]
) -> MemoryFit:
    """The line through measured points, least squares of the relative errors, no price below zero.

    It goes through the large points or through all that are well above the floor, whichever it misses by less: a loss
    in chunks, say, takes memory by the cell only until a chunk is full, and small points know nothing of large ones.
    """
    floor, largest = min(point.num_bytes for point in points), max(point.num_bytes for point in points)
    fits = []
    for least in (ABOVE_FLOOR * floor, *(largest / span for span in LARGE_SPANS)):
        above = [point for point in points if point.num_bytes > least]
        kept = above if len(above) >= LEAST_POINTS else list(points)
        fixed, per_cell, per_pair, per_sample, per_other, per_other_pair, per_cross_pair = _solve(kept)
        fit = MemoryFit(
            points=tuple(points), floor=float(floor), fixed=fixed, per_cell=per_cell, per_pair=per_pair,
            per_sample=per_sample, per_other=per_other, per_other_pair=per_other_pair,
            per_cross_pair=per_cross_pair, uncertainty=0.0, resident_bytes=resident_bytes,
            optimiser_bytes=optimiser_bytes, facts=dict(facts),
        )  # fmt: skip
        fits.append(replace(fit, uncertainty=max(LEAST_UNCERTAINTY, *_errors(fit, kept))))
    return min(fits, key=lambda fit: fit.uncertainty)


def _errors(fit: MemoryFit, kept: Sequence[Point]) -> list[float]:
    """How far the line misses each point it was made from, and where there are enough, how far without that point."""
    own = [abs(error) for point, error in zip(fit.points, fit.residuals, strict=True) if point in kept]
    return [*own, *_left_out_errors(fit, kept)]


def _left_out_errors(fit: MemoryFit, kept: Sequence[Point]) -> list[float]:
    """How far the line through the others misses each point; none where too few are left."""
    if len(kept) < LEAST_POINTS:
        return []
    errors = []
    for at, point in enumerate(kept):
        prices = _solve([*kept[:at], *kept[at + 1 :]])
        line = max(fit.floor, float(_columns([point])[0] @ prices))
        errors.append(abs(line / max(point.num_bytes, 1) - 1))
    return errors


def _solve(points: Sequence[Point]) -> tuple[float, ...]:
    measured = np.array([max(p.num_bytes, 1) for p in points], dtype=np.float64)
    return tuple(float(x) for x in solve_nonnegative(_columns(points) / measured[:, None], np.ones(len(points))))


def _columns(points: Sequence[Point]) -> Floats:
    return np.array([[1, *p.shape] for p in points], dtype=np.float64)  # [points, 7]


def solve_nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """The x >= 0 with the smallest |columns @ x - wanted|: the best of all choices of columns that are not zero.

    Exact, and quick for the few columns there are here.
    """
    number = columns.shape[1]
    best, least = np.zeros(number), float(wanted @ wanted)
    scale = np.linalg.norm(columns, axis=0)
    useful = np.flatnonzero(scale).tolist()
    scale[scale == 0] = 1.0
    scaled = columns / scale
    for size in range(1, len(useful) + 1):
        for chosen in combinations(useful, size):
            part, _, _, _ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
            if (part < 0).any():
                continue
            x = np.zeros(number)
            x[list(chosen)] = part / scale[list(chosen)]
            error = float(np.square(columns @ x - wanted).sum())
            if error < least * (1 - 1e-9):  # An equal one with more columns is no better.
                best, least = x, error
    return best


def save_fit(fit: MemoryFit, folder: Path) -> Path:
    """Write `fit.json` into a run's folder, where training finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FIT, fit.to_dict())
    return folder / FIT


def load_fit(folder: Path) -> MemoryFit | None:
    """The fit a run's folder holds; None without one."""
    if not (folder / FIT).is_file():
        return None
    try:
        return fit_of_values(read_json(folder / FIT, max_bytes=1 << 20))
    except (KeyError, TypeError, CheckpointError) as error:
        said = error.seen if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{FIT} is not a memory fit",
            seen=f"{folder / FIT}: {said}",
            do="delete the file, or measure again with `truebatch fit`",
        ) from error


def fit_of_values(values: Mapping[str, Any]) -> MemoryFit:
    """The fit that `to_dict` gave; KeyError or TypeError for anything else."""
    optional = {"is_estimate", "samples_per_second", "most_cells", "per_other", "per_other_pair", "per_cross_pair"}
    kept = {name: values[name] for name in MemoryFit.__dataclass_fields__ if name not in optional - set(values)}
    return _with_numbers(MemoryFit(**{**kept, "points": tuple(Point(**point) for point in kept["points"])}))


def _with_numbers(fit: MemoryFit) -> MemoryFit:
    """The fit, if what should be numbers are such: whatever else a file holds would fail far from here."""
    names = ("floor", "fixed", "uncertainty", "resident_bytes", "optimiser_bytes")
    numbers = [(name, getattr(fit, name)) for name in names]
    numbers += [("prices", price) for price in fit.prices]
    numbers += [("points", value) for point in fit.points for value in (*point.shape, point.num_bytes)]
    wrong = [name for name, value in numbers if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong or not isinstance(fit.facts, Mapping) or not fit.points:
        raise TypeError(f"no number: {wrong[0]}" if wrong else "no points, or no facts by name")
    return fit


def changed_facts(fit: MemoryFit, facts: Mapping[str, Any]) -> list[str]:
    """Which facts are not those of the fit, in words; empty if the fit still holds."""
    names = [*fit.facts, *(name for name in facts if name not in fit.facts)]
    return [
        f"{name} was {fit.facts.get(name)!r}, is {facts.get(name)!r}"
        for name in names
        if fit.facts.get(name) != facts.get(name)
    ]


MOST_SAMPLES = 20_000
"""Plans are tried with so many samples, drawn from all; the longest is always among them."""
TRIALS, LESS, HALF = 4, 0.98, 0.5
FLAT = 0.05
"""Where the cells of the largest probe make a smaller part of its bytes than this, memory may come in stairs, of which one
was seen: then nothing larger than that probe is promised."""
STEPS = 8
"""Every plan is tried with all samples as one step, and with this many steps, which are cut less evenly."""


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """How long samples are: along the axis that is planned, and along others that are laid in rows as well."""

    lengths: Ints
    others: tuple[Ints, ...] = ()
    ids: Ints | None = None
    """Which samples of the data these are; None: all of them."""

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, places: Ints) -> Sizes:
        """Those at some places."""
        ids = places if self.ids is None else self.ids[places]
        return Sizes(self.lengths[places], tuple(other[places] for other in self.others), ids)

    def drawn(self, most: int) -> Sizes:
        """So many of them at the most, the longest always among them."""
        if len(self) <= most:
            return self
        drawn = np.random.default_rng(0).choice(len(self), most - 1, replace=False)
        return self.take(np.append(drawn, self.lengths.argmax()))

    @property
    def totals(self) -> Ints:
        """Along all axes together."""
        return sum(self.others, start=self.lengths)

    @property
    def longest_first(self) -> Sizes:
        """As if the longest along every axis were one sample: no sample with as many cells takes more."""
        return Sizes(np.sort(self.lengths)[::-1], tuple(np.sort(other)[::-1] for other in self.others))

    def shape(self, layout: Layout) -> MemoryShape:
        """One micro-batch of all of them. Cells of other axes attend to themselves and to the planned ones."""
        number, own, others = len(self), self.lengths, self.others
        if layout == "padded":
            own = np.full(number, own.max())
            others = tuple(np.full(number, other.max()) for other in others)
        cells, pairs = int(own.sum()), int(np.square(own).sum())
        apart = [(int(other.sum()), int(np.square(other).sum()), int((other * own).sum())) for other in others]
        return MemoryShape(cells, pairs, number, *(sum(part) for part in zip(*apart, strict=True)))


def largest_cells(fit: MemoryFit, sizes: Sizes, *, layout: Layout, limit_bytes: int) -> int:
    """The largest budget of cells under which micro-batches of these samples need no more than the limit.

    The first trial would be safe even if all samples were as dear a cell as the dearest. From there on the dearest
    micro-batch of a real plan counts: the larger the budget, the less can a micro-batch differ from the others. What is
    given was tried: no micro-batch of its own plans needs more. 0 if nothing fits. Never above what was seen not to fit.
    """
    cells = _largest_by_line(fit, sizes, layout=layout, limit_bytes=limit_bytes)
    return cells if fit.most_cells is None else min(cells, fit.most_cells)


def _largest_by_line(fit: MemoryFit, sizes: Sizes, *, layout: Layout, limit_bytes: int) -> int:
    left = (limit_bytes - fit.constant_bytes) / (1 + fit.uncertainty) - fit.fixed
    if left <= 0 or left + fit.fixed < fit.floor:
        return 0
    drawn = sizes.drawn(MOST_SAMPLES)
    longest, most = max(int(drawn.lengths.max()), 1), int(drawn.lengths.sum()) // 2
    price = max(_price_alone(fit, drawn, length) for length in (longest, max(int(drawn.lengths.min()), 1)))
    largest = max(fit.points, key=lambda point: point.cells)
    cells = largest.cells
    if price * largest.cells > FLAT * largest.num_bytes:
        for _ in range(TRIALS):
            trial = max(min(math.floor(left / price), most), longest)
            shapes = _shapes(drawn, layout, trial)
            price = min(price, max(fit.varying(*shape) / max(shape.cells, trial // 2) for shape in shapes))
        cells = math.floor(left / price)
    while cells >= longest:
        shapes = _shapes(drawn, layout, cells)
        most_needed = max(fit.varying(*shape) for shape in shapes)
        if most_needed <= left:
            break
        held = max(shape.cells for shape in shapes)  # less than the budget where all samples fit into one micro-batch
        cells = math.floor(min(cells, held) * max(min(LESS, left / most_needed), HALF))
    return cells


def _price_alone(fit: MemoryFit, sizes: Sizes, length: int) -> float:
    """Bytes a cell of a sample of this length that is as long along other axes as any."""
    others = tuple(np.array([int(other.max())]) for other in sizes.others)
    return fit.varying(*Sizes(np.array([length]), others).shape("padded")) / length


def _shapes(sizes: Sizes, layout: Layout, cells: int) -> list[MemoryShape]:
    """Of every micro-batch of the plans under a budget."""
    shapes = []
    for samples_per_step in {len(sizes), max(1, len(sizes) // STEPS)}:
        plan = build_plan(sizes.lengths, PlanConfig(layout=layout, cells=cells, samples_per_step=samples_per_step))
        for rows in (rows for at in range(plan.num_steps) for rows in plan.step(at)[0]):
            shapes += [sizes.take(rows.ids).shape(layout)] if len(rows.ids) else []
    return shapes
