"""Assign the micro-batches and rows of each step to ranks.

Units (no rank yet) -> places_of (equal numbers, balanced cost) -> Cut (step -> rank -> micro-batch -> row -> sample)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.planning.config import MicroBatchLimits, PlanConfig
from truebatch.planning.csr import (
    segment_maxima,
    segment_of,
    segment_sums,
    stable_order,
    stable_sort,
    starts_of,
    take_segments,
)
from truebatch.planning.limits_table import packed_table
from truebatch.planning.loops import jit
from truebatch.planning.rows import Ints
from truebatch.planning.sample_table import Samples, balance_cost


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Steps laid out step -> rank -> micro-batch -> row -> sample; ranks have equal numbers of micro-batches."""

    order: NDArray[Any]
    """[N] sample ids in execution order."""
    micro_starts: NDArray[Any]
    """[M + 1] start of each micro-batch in `row_starts` if there is one, else in `order`."""
    step_starts: NDArray[Any]
    """[S + 1] the first micro-batch of each step."""
    row_starts: NDArray[Any] | None = None
    """[R + 1] start of each fixed packed row in `order`; otherwise rows follow from the layout."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What is assigned to ranks: padded micro-batches, fixed packed rows, or micro-batches of such rows."""

    order: Ints
    """[N] sample ids, unit by unit."""
    starts: Ints
    """[U + 1] start of each unit in `row_starts` if there is one, else in `order`."""
    costs: Ints
    """[U] cost of each unit."""
    step_starts: Ints
    """[S + 1] the first unit of each step."""
    row_starts: Ints | None = None
    """[R + 1] start of each fixed packed row in `order`."""

    @property
    def sample_starts(self) -> Ints:
        """[U + 1] start of each unit in `order`."""
        return self.starts if self.row_starts is None else self.row_starts[self.starts]


def make_units(
    samples: Samples, order: Ints, starts: Ints, step_starts: Ints, config: PlanConfig, row_starts: Ints | None = None
) -> Units:
    """Units with their costs: rows times the widest (padded), or the sum over the samples (packed)."""
    if row_starts is None:
        widths = segment_maxima(samples.lengths[order], starts)
        costs = np.diff(starts) * balance_cost(widths, config.pair_cost)
    else:
        costs = segment_sums(samples.cost(order, config.pair_cost), row_starts[starts])
    return Units(order, starts, costs, step_starts, row_starts)


def take_units(units: Units, chosen: Ints, step_starts: Ints) -> Units:
    """Select units in that order, as steps that begin at `step_starts`."""
    costs = units.costs[chosen]
    if units.row_starts is None:
        order, starts = take_segments(units.order, units.starts, chosen)
        return Units(order, starts, costs, step_starts)
    rows, starts = take_segments(np.arange(len(units.row_starts) - 1), units.starts, chosen)
    order, row_starts = take_segments(units.order, units.row_starts, rows)
    return Units(order, starts, costs, step_starts, row_starts)


def deal_units(samples: Samples, units: Units, config: PlanConfig, *, ranks: int) -> StepLayout:
    """Share the units of each step over the ranks; rows of one rank share micro-batches where the limits allow."""
    place_of, step_starts = places_of(units, ranks)
    by_place, _ = stable_order(place_of, int(step_starts[-1]))
    dealt = take_units(units, by_place, units.step_starts)
    if config.rows_per_step is not None and may_join_rows(config):
        return _join_dealt(samples, dealt, place_of[by_place], step_starts, config, ranks)
    counts = np.zeros(int(step_starts[-1]), dtype=np.int64)
    counts[place_of[by_place]] = np.diff(dealt.starts)
    return StepLayout(dealt.order, starts_of(counts), step_starts, dealt.row_starts)


def places_of(units: Units, ranks: int) -> tuple[Ints, Ints]:
    """[U] the slot of each unit among the ranks * ceil(units / ranks) of its step, and the start of each step."""
    step_of = segment_of(units.step_starts)
    first_ids = units.order[units.sample_starts[:-1]]
    # Sorted by content, not by arrival, so that assigning a step again gives the same result.
    by_cost = np.lexsort((first_ids, -units.costs)).astype(np.int64, copy=False)
    ranking, _ = stable_sort(by_cost, step_of[by_cost], len(units.step_starts) - 1)
    place_of = np.zeros(len(units.costs), dtype=np.int64)
    loads = np.zeros(2 * ranks, dtype=np.int64)
    jit.call("deal_steps", place_of, loads, ranking, units.costs, units.step_starts, ranks, num=len(units.order))
    per_rank = np.maximum(1, -(-np.diff(units.step_starts) // ranks))
    return place_of, starts_of(per_rank * ranks)


def may_join_rows(config: PlanConfig) -> bool:
    """True if two rows can ever share a micro-batch."""
    assert config.row_cells is not None
    return config.cells is None or 2 * config.row_cells <= config.cells


def join_rows(samples: Samples, order: Ints, row_starts: Ints, shares: Ints, config: PlanConfig) -> Ints:
    """[R] the micro-batch of each row within its share: rows in order, while every limit holds."""
    assert config.row_cells is not None
    columns = {name: segment_sums(column[order], row_starts) for name, column in samples.costs.items()}
    lengths = samples.lengths[order].astype(np.int64)
    pairs = segment_sums(lengths * lengths, row_starts) if config.pairs is not None else None
    taken: dict[str, Any] = {
        "cells": np.full(len(row_starts) - 1, config.row_cells),
        "samples": np.diff(row_starts),
        "pairs": pairs,
    }
    caps = {name: getattr(config, name) for name in taken if getattr(config, name) is not None}
    columns |= {f"limit {name}": taken[name] for name in caps}
    named = MicroBatchLimits(costs=dict(config.costs) | {f"limit {name}": cap for name, cap in caps.items()})
    sizes, limits = packed_table(np.zeros(len(row_starts) - 1, dtype=np.int64), columns, named)
    group_of = np.zeros(len(row_starts) - 1, dtype=np.int64)
    used = np.zeros(len(limits), dtype=np.int64)
    jit.call("join_rows", group_of, used, shares, sizes, limits, num=len(order))
    return group_of


def _join_dealt(
    samples: Samples, dealt: Units, places: Ints, step_starts: Ints, config: PlanConfig, ranks: int
) -> StepLayout:
    """Merge adjacent rows of a rank; all ranks of a step get as many micro-batches as the one that needs most."""
    assert dealt.row_starts is not None
    num_steps = len(step_starts) - 1
    step_of = segment_of(dealt.step_starts)
    rank_of = (places - step_starts[step_of]) // (np.diff(step_starts) // ranks)[step_of]
    shares = starts_of(np.bincount(step_of * ranks + rank_of, minlength=num_steps * ranks))
    group_of = join_rows(samples, dealt.order, dealt.row_starts, shares, config)
    per_rank = np.ones(num_steps, dtype=np.int64)
    np.maximum.at(per_rank, step_of, group_of + 1)
    joined_starts = starts_of(per_rank * ranks)
    micro_of = joined_starts[step_of] + rank_of * per_rank[step_of] + group_of
    micro_starts = starts_of(np.bincount(micro_of, minlength=int(joined_starts[-1])))
    return StepLayout(dealt.order, micro_starts, joined_starts, dealt.row_starts)


def units_of_step(samples: Samples, cut: StepLayout, step: int, config: PlanConfig) -> Units:
    """Recover the units of one step from their assignment to some number of ranks."""
    first, last = int(cut.step_starts[step]), int(cut.step_starts[step + 1])
    starts = np.asarray(cut.micro_starts[first : last + 1], dtype=np.int64)
    starts = starts[np.append(True, np.diff(starts) > 0)]  # without the empty micro-batches
    row_starts = None
    if cut.row_starts is not None:
        row_starts = np.asarray(cut.row_starts[starts[0] : starts[-1] + 1], dtype=np.int64)
        order = np.asarray(cut.order[row_starts[0] : row_starts[-1]], dtype=np.int64)
        row_starts = row_starts - row_starts[0]
        starts = starts - starts[0] if config.rows_per_step is None else np.arange(len(row_starts), dtype=np.int64)
    else:
        order = np.asarray(cut.order[starts[0] : starts[-1]], dtype=np.int64)
        starts = starts - starts[0]
    return make_units(samples, order, starts, np.array([0, len(starts) - 1], dtype=np.int64), config, row_starts)


def deal_atoms(atoms: StepLayout, *, ranks: int) -> StepLayout:
    """The atoms of each step, as they were cut for one rank, dealt to several: the order of all samples stays.

    A rank gets ceil(atoms / ranks) neighbours, those at the end fewer or none: sums of neighbours are parts of one tree.
    """
    starts, steps = _without_empty(atoms)
    num_atoms = np.diff(steps)
    slots = starts_of(np.maximum(1, -(-num_atoms // ranks)) * ranks)
    step_of = segment_of(slots)
    place = np.arange(int(slots[-1]), dtype=np.int64) - slots[step_of]
    at = steps[step_of] + np.minimum(place, num_atoms[step_of])
    return StepLayout(atoms.order, np.append(starts[at], starts[-1]), slots)


def _without_empty(atoms: StepLayout) -> tuple[Ints, Ints]:
    """Starts of the atoms that hold samples, and the first of each step."""
    starts = np.asarray(atoms.micro_starts, dtype=np.int64)
    is_used = np.diff(starts) > 0
    steps = starts_of(is_used.astype(np.int64))[np.asarray(atoms.step_starts)]
    return np.append(starts[:-1][is_used], starts[-1]), steps
