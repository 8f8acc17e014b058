"""The largest budget of cells that is safe for the user's samples: by the plans that would be made under it.

lengths -> trial budget -> its plan -> the micro-batch that needs most -> the next, larger trial
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints, Layout
from truebatch.planning.settings import PlanConfig
from truebatch.training.memoryfit import MemoryFit, Shape

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

    def shape(self, layout: Layout) -> Shape:
        """One micro-batch of all of them. Cells of other axes attend to themselves and to the planned ones."""
        number, own, others = len(self), self.lengths, self.others
        if layout == "padded":
            own = np.full(number, own.max())
            others = tuple(np.full(number, other.max()) for other in others)
        cells, pairs = int(own.sum()), int(np.square(own).sum())
        apart = [(int(other.sum()), int(np.square(other).sum()), int((other * own).sum())) for other in others]
        return Shape(cells, pairs, number, *(sum(part) for part in zip(*apart, strict=True)))


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


def _shapes(sizes: Sizes, layout: Layout, cells: int) -> list[Shape]:
    """Of every micro-batch of the plans under a budget."""
    shapes = []
    for samples_per_step in {len(sizes), max(1, len(sizes) // STEPS)}:
        plan = build_plan(sizes.lengths, PlanConfig(layout=layout, cells=cells, samples_per_step=samples_per_step))
        for rows in (rows for at in range(plan.num_steps) for rows in plan.step(at)[0]):
            shapes += [sizes.take(rows.ids).shape(layout)] if len(rows.ids) else []
    return shapes
