"""Form steps as sets of samples and cut each for a number of ranks.

keyed order -> steps (form_steps) -> micro-batches (cut_steps) -> ranks
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from truebatch.planning.assign_ranks import StepLayout, Units, deal_atoms, deal_units, make_units
from truebatch.planning.config import PlanConfig
from truebatch.planning.csr import chunk_starts, segment_of, stable_order, starts_of
from truebatch.planning.keyed_rng import keyed_shuffle
from truebatch.planning.limits_table import NO_LIMIT, packed_table, padded_table
from truebatch.planning.loops import jit
from truebatch.planning.rows import Ints
from truebatch.planning.sample_table import Samples, balance_cost


def keyed_sample_order(ids: Ints, config: PlanConfig, epoch: int) -> Ints:
    """Shuffle samples for an epoch; the order of two samples never depends on a third."""
    return keyed_shuffle(ids, config.seed, epoch, "sample order")


def form_steps(samples: Samples, ids: Ints, config: PlanConfig) -> Ints:
    """Start of each step in `ids`, which are in keyed order; depends only on that order and the step size."""
    if config.samples_per_step is not None:
        return chunk_starts(len(ids), config.samples_per_step)
    assert config.tokens_per_step is not None
    ends = np.cumsum(samples.lengths[ids], dtype=np.int64)
    starts = [0]
    while starts[-1] < len(ids):
        done = int(ends[starts[-1] - 1]) if starts[-1] else 0
        starts.append(int(np.searchsorted(ends, done + config.tokens_per_step, side="right")))
    return np.array(starts, dtype=np.int64)


def cut_steps(samples: Samples, ids: Ints, starts: Ints, config: PlanConfig, *, ranks: int) -> StepLayout:
    """Cut every step for a number of ranks; the cut of a step depends on its samples alone."""
    if config.atoms:
        return deal_atoms(cut_steps(samples, ids, starts, replace(config, atoms=False), ranks=1), ranks=ranks)
    if config.layout == "packed":
        if config.row_widths and config.pairs is None and config.samples is None and not config.costs:
            return _cut_to_widths(samples, _longest_first(samples, ids, starts), starts, config, ranks)
        return _cut_packed(samples, _longest_first(samples, ids, starts), starts, config, ranks)
    if config.grouping == "budget":
        ids = _longest_first(samples, ids, starts)
    buckets = segment_of(starts)
    if config.grouping == "bucketed":
        ids, buckets = by_bucket(samples, ids, buckets, config.bucket_width)
    units = padded_units(samples, ids, starts, buckets, config, ranks=ranks, is_even=config.grouping == "budget")
    return deal_units(samples, units, config, ranks=ranks)


def by_bucket(samples: Samples, ids: Ints, stretch: Ints, width: int) -> tuple[Ints, Ints]:
    """Sort the samples of each segment by `length // width`, and number the buckets of each segment."""
    bucket = samples.lengths[ids].astype(np.int64) // width
    num = int(bucket.max()) + 1
    key = stretch * num + bucket
    order = np.argsort(key, kind="stable")
    return ids[order], key[order]


def padded_units(
    samples: Samples, ids: Ints, starts: Ints, buckets: Ints, config: PlanConfig, *, ranks: int, is_even: bool
) -> Units:
    """Group adjacent `ids` into padded micro-batches within every limit, step by step."""
    lengths = samples.lengths[ids].astype(np.int64)
    sizes, limits = padded_table(len(ids), {name: c[ids] for name, c in samples.costs.items()}, config.limits)
    group_of, num_groups = np.zeros(len(ids), dtype=np.int64), np.zeros(len(starts) - 1, dtype=np.int64)
    jit.call(
        "cut_padded_steps", group_of, num_groups, np.zeros(len(limits), dtype=np.int64),
        np.zeros(2 * int(np.diff(starts).max()) + 2, dtype=np.int64),
        starts, lengths, buckets, balance_cost(lengths, config.pair_cost), sizes, limits,
        config.cells or NO_LIMIT, config.pairs or NO_LIMIT, ranks, is_even, num=len(ids),
    )  # fmt: skip
    step_units = starts_of(num_groups)
    group_of += np.repeat(step_units[:-1], np.diff(starts))
    order, unit_starts = stable_order(group_of, int(step_units[-1]))
    return make_units(samples, ids[order], unit_starts, step_units, config)


def _longest_first(samples: Samples, ids: Ints, starts: Ints) -> Ints:
    """The samples of each step by length, longest first, then by id: an order that depends only on the set."""
    by_id, _ = stable_order(ids, len(samples.lengths))
    lengths = samples.lengths[ids].astype(np.int64)
    longest = int(lengths.max())
    by_length, _ = stable_order((longest - lengths)[by_id], longest + 1)
    mixed = by_id[by_length]
    by_step, _ = stable_order(segment_of(starts)[mixed], len(starts) - 1)
    return ids[mixed[by_step]]


def _cut_packed(samples: Samples, ids: Ints, starts: Ints, config: PlanConfig, ranks: int) -> StepLayout:
    sizes, limits = packed_table(samples.lengths[ids], {n: c[ids] for n, c in samples.costs.items()}, config.limits)
    most = int(np.diff(starts).max()) + ranks
    bin_of, per_rank = np.zeros(len(ids), dtype=np.int64), np.zeros(len(starts) - 1, dtype=np.int64)

    def work(num: int) -> Ints:
        return np.zeros(num, dtype=np.int64)

    jit.call(
        "cut_packed_steps", bin_of, per_rank, work(len(ids) + ranks), work(most * max(1, len(limits))), work(most),
        work(most), work(2 * ranks), work(ranks * max(1, len(limits))),
        starts, samples.cost(ids, config.pair_cost), sizes, limits, ranks, num=len(ids),
    )  # fmt: skip
    step_starts = starts_of(per_rank * ranks)
    bin_of += np.repeat(step_starts[:-1], np.diff(starts))
    order, micro_starts = stable_order(bin_of, int(step_starts[-1]))
    return StepLayout(ids[order], micro_starts, step_starts)


def _cut_to_widths(samples: Samples, ids: Ints, starts: Ints, config: PlanConfig, ranks: int) -> StepLayout:
    """Packed rows of a few widths, nearly full. With other limits than cells, `_cut_packed` forms the rows."""
    lengths = samples.lengths[ids].astype(np.int64)
    bin_of, per_rank = np.full(len(ids), -1, dtype=np.int64), np.zeros(len(starts) - 1, dtype=np.int64)
    # What finds no room opens rows of its own, at the most one for each sample, beside those that were opened in vain.
    widths = np.array(config.row_widths, dtype=np.int64)
    most = int(np.diff(starts).max()) * 2 + int(lengths.sum() // widths[-1]) + 64

    def work(num: int) -> Ints:
        return np.zeros(num, dtype=np.int64)

    jit.call(
        "cut_width_steps", bin_of, per_rank, work(len(ids)), work(most), work(most), work(most), work(2 * ranks),
        work(ranks), starts, samples.cost(ids, config.pair_cost), lengths, widths, ranks, num=len(ids),
    )  # fmt: skip
    step_starts = starts_of(per_rank * ranks)
    bin_of += np.repeat(step_starts[:-1], np.diff(starts))
    order, micro_starts = stable_order(bin_of, int(step_starts[-1]))
    return StepLayout(ids[order], micro_starts, step_starts)
