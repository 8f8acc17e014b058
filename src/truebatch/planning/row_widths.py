"""A few widths for packed rows: compiled layers are compiled once for each, and the rows of every step are nearly full.

Each width is a multiple of the next, so rows come as near to the tokens of a step as its narrowest width allows.

lengths -> families of widths -> the plan of a few steps with each -> nearly full, and as few rows as possible
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan, build_plan
from truebatch.planning.rows import Ints

MOST_WIDTHS = 7
"""Compilations of a model: torch gives up on a function after eight."""
TILE = 64
"""Every width is a multiple of it, for kernels work in tiles of that many cells."""
ENOUGH_FILL = 0.975
ROW_COST = 512
"""What a row costs beside its cells, in cells: its kernels are started one by one."""
WIDTH_COST = 0.002
"""What another width costs, as a share of all cells: a compilation."""
TRIED_STEPS, TRIED_SAMPLES = 48, 3072
"""Steps, and about how many samples, that widths are tried on."""
SCALES, DIVISORS = (1.0, 0.875, 0.75, 0.625), (2, 4, 8)
NARROW = (0.01, 0.04)
"""The narrowest row is between these shares of the tokens of a step: narrower ones are many, wider ones stay empty."""

WIDEST_ATOM = 8192
"""Cells that keep a GPU busy; an atom is wider only where a sample is longer."""
ATOMS_PER_STEP = 16
"""About as many atoms has a step, where its samples allow it: they are what can be dealt to ranks."""


def choose_atom_cells(lengths: Ints, *, samples_per_step: int) -> int:
    """The width of the atoms of a run that names none; it follows from its lengths and the size of its steps alone.

    >>> choose_atom_cells(np.full(1000, 100), samples_per_step=256)
    1600
    """
    measured = np.asarray(lengths, dtype=np.int64)
    tokens = int(measured.sum()) * samples_per_step // len(measured)
    wanted = min(WIDEST_ATOM, -(-tokens // ATOMS_PER_STEP))
    return -(-max(int(measured.max()), wanted, 1) // TILE) * TILE


def choose_row_widths(
    lengths: Ints, *, cells: int, samples_per_step: int, ranks: int = 1, seed: int = 0
) -> tuple[int, ...]:
    """The widths of at most `cells` cells with which the rows of steps of these samples are fullest, and few.

    The widest holds the longest sample. Steps with too few tokens for it stay partly empty: see `fill_of`.

    >>> choose_row_widths(np.full(1000, 100), cells=4096, samples_per_step=256)
    (3648, 912)
    """
    drawn = _some_steps(np.asarray(lengths, dtype=np.int64), samples_per_step, seed)
    longest = int(np.max(lengths))
    best: tuple[int, ...] = ()
    least, filled = np.inf, False
    for widths in _families(longest, cells, int(drawn.sum()) * samples_per_step // len(drawn) // ranks):
        statistics = _plan(drawn, widths, samples_per_step, ranks).statistics
        is_full = statistics.fill >= ENOUGH_FILL
        spent = statistics.cells * (1 + WIDTH_COST * len(widths)) + ROW_COST * statistics.micro_batches
        price = spent if is_full else statistics.cells
        if (is_full, -price) > (filled, -least):
            best, least, filled = widths, price, is_full
    return best


def fill_of(
    lengths: Ints, widths: Sequence[int], *, samples_per_step: int, ranks: int = 1, seed: int = 0
) -> float:  # fmt: skip
    """The share of the cells of such rows that are tokens, by some steps of these samples."""
    drawn = _some_steps(np.asarray(lengths, dtype=np.int64), samples_per_step, seed)
    return _plan(drawn, tuple(widths), samples_per_step, ranks).statistics.fill


def _some_steps(lengths: Ints, samples_per_step: int, seed: int) -> Ints:
    number = min(len(lengths), samples_per_step * max(1, min(TRIED_STEPS, TRIED_SAMPLES // samples_per_step)))
    return np.random.default_rng(seed).permutation(lengths)[:number]


def _plan(lengths: Ints, widths: tuple[int, ...], samples_per_step: int, ranks: int) -> Plan:
    config = PlanConfig(layout="packed", cells=widths[0], row_widths=widths, samples_per_step=samples_per_step)
    return build_plan(lengths, config, ranks=ranks)


def _families(longest: int, cells: int, tokens: int) -> Iterator[tuple[int, ...]]:
    """Widths to try for steps of about so many tokens: a widest one that holds the longest sample, and others that are
    each half of the one before, the first of them a half, a quarter or an eighth of the widest."""
    least, most_narrow = min(longest, cells), max(NARROW[1] * tokens, 2 * TILE)
    yield (cells,)
    for scale in SCALES:
        target = int(cells * scale)
        while target >= least:
            for divisor in DIVISORS:
                for others in range(1, MOST_WIDTHS):
                    narrowest = target // (divisor << (others - 1)) // TILE * TILE
                    widths = tuple(narrowest << k for k in reversed(range(others)))
                    widest = narrowest * (divisor << (others - 1))
                    if narrowest and widest >= least and NARROW[0] * tokens <= narrowest <= most_narrow:
                        yield (widest, *widths)
            target //= 2
