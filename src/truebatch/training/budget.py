"""The largest budget of cells that is safe for the user's samples: by the plans that would be made under it.

lengths -> trial budget -> its plan -> the micro-batch that needs most -> the next, larger trial
"""

from __future__ import annotations

import math

import numpy as np

from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints, Layout
from truebatch.planning.settings import PlanConfig
from truebatch.training.memoryfit import MemoryFit

MOST_SAMPLES = 20_000
"""Plans are tried with so many samples, drawn from all; the longest is always among them."""
TRIALS, LESS, HALF = 4, 0.98, 0.5
FLAT = 0.05
"""Where the cells of the largest probe make a smaller part of its bytes than this, memory may come in stairs, of which one
was seen: then nothing larger than that probe is promised."""
STEPS = 8
"""Every plan is tried with all samples as one step, and with this many steps, which are cut less evenly."""


def largest_cells(fit: MemoryFit, lengths: Ints, *, layout: Layout, limit_bytes: int) -> int:
    """The largest budget of cells under which micro-batches of these samples need no more than the limit.

    The first trial would be safe even if all samples were as dear a cell as the dearest. From there on the dearest
    micro-batch of a real plan counts: the larger the budget, the less can a micro-batch differ from the others. What is
    given was tried: no micro-batch of its own plans needs more. 0 if nothing fits. Never above what was seen not to fit.
    """
    cells = _largest_by_line(fit, lengths, layout=layout, limit_bytes=limit_bytes)
    return cells if fit.most_cells is None else min(cells, fit.most_cells)


def _largest_by_line(fit: MemoryFit, lengths: Ints, *, layout: Layout, limit_bytes: int) -> int:
    left = (limit_bytes - fit.constant_bytes) / (1 + fit.uncertainty) - fit.fixed
    if left <= 0 or left + fit.fixed < fit.floor:
        return 0
    drawn = _drawn(lengths)
    longest, most = max(int(drawn.max()), 1), int(drawn.sum()) // 2
    ends = (longest, max(int(drawn.min()), 1))
    price = fit.per_cell + max(n * fit.per_pair + fit.per_sample / n for n in ends)
    largest = max(fit.points, key=lambda point: point.cells)
    cells = largest.cells
    if price * largest.cells > FLAT * largest.num_bytes:
        for _ in range(TRIALS):
            trial = max(min(math.floor(left / price), most), longest)
            shapes = _shapes(drawn, layout, trial)
            price = min(price, max(_needs(fit, shape) / max(shape[0], trial // 2) for shape in shapes))
        cells = math.floor(left / price)
    while cells >= longest:
        shapes = _shapes(drawn, layout, cells)
        most_needed = max(_needs(fit, shape) for shape in shapes)
        if most_needed <= left:
            break
        held = max(shape[0] for shape in shapes)  # less than the budget where all samples fit into one micro-batch
        cells = math.floor(min(cells, held) * max(min(LESS, left / most_needed), HALF))
    return cells


def _drawn(lengths: Ints) -> Ints:
    if len(lengths) <= MOST_SAMPLES:
        return lengths
    drawn = np.random.default_rng(0).choice(lengths, MOST_SAMPLES - 1, replace=False)
    return np.append(drawn, lengths.max())


def _shapes(lengths: Ints, layout: Layout, cells: int) -> list[tuple[int, int, int]]:
    """Cells, pairs and samples of every micro-batch of the plans under a budget."""
    shapes = []
    for samples_per_step in {len(lengths), max(1, len(lengths) // STEPS)}:
        plan = build_plan(lengths, PlanConfig(layout=layout, cells=cells, samples_per_step=samples_per_step))
        for rows in (rows for at in range(plan.num_steps) for rows in plan.step(at)[0]):
            shapes += [shape_of_lengths(lengths[rows.ids], layout)] if len(rows.ids) else []
    return shapes


def _needs(fit: MemoryFit, shape: tuple[int, int, int]) -> float:
    """Bytes of a micro-batch without what is fixed."""
    cells, pairs, samples = shape
    return fit.per_cell * cells + fit.per_pair * pairs + fit.per_sample * samples


def shape_of_lengths(lengths: Ints, layout: Layout) -> tuple[int, int, int]:
    """Cells, pairs and samples of one micro-batch of samples with these lengths."""
    if layout == "packed":
        return int(lengths.sum()), int(np.square(lengths).sum()), len(lengths)
    width = int(lengths.max())
    return len(lengths) * width, len(lengths) * width * width, len(lengths)
