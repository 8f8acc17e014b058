"""Form rows and micro-batches over a whole epoch, then assign them to steps at random.

fresh random order -> packed rows or padded micro-batches of similar lengths -> steps
"""

from __future__ import annotations

import numpy as np

from truebatch.planning.assign_ranks import Units, join_rows, take_units
from truebatch.planning.config import MicroBatchLimits, PlanConfig
from truebatch.planning.csr import (
    chunk_starts,
    segment_maxima,
    segment_sums,
    stable_sort,
    starts_of,
    take_segments,
)
from truebatch.planning.cut_steps import by_bucket, keyed_sample_order, padded_units
from truebatch.planning.keyed_rng import keyed_hash, keyed_order, keyed_shuffle
from truebatch.planning.limits_table import Table, packed_table
from truebatch.planning.loops import jit
from truebatch.planning.loops.pack import LENGTH_BITS
from truebatch.planning.rows import Ints
from truebatch.planning.sample_table import LONGEST, Samples, balance_cost

_FILLER_SHARE = 7
"""The shortest samples, up to one part in this many of all tokens, are packed last and longest first."""
_JITTER_BITS = 7
"""Padded: samples whose lengths differ by less than one part in 2**7 may swap places between epochs."""
_FRACTION_BITS = 6
_HASH_BITS = 27


def form_units(samples: Samples, ids: Ints, config: PlanConfig, epoch: int, *, fullest_first: bool = False) -> Units:
    """Units of the whole epoch assigned to steps: at random, or (for streams) with the emptiest left for the end."""
    units = (
        _form_rows(samples, ids, config, epoch) if config.has_fixed_rows else _form_padded(samples, ids, config, epoch)
    )
    size = config.rows_per_step or config.micro_batches_per_step
    assert size is not None
    chosen = keyed_order(len(units.costs), config.seed, epoch, "steps")
    if fullest_first:
        chosen = _emptiest_last(samples, units, chosen, size, config)
    return take_units(units, chosen, chunk_starts(len(chosen), size))


def _form_rows(samples: Samples, ids: Ints, config: PlanConfig, epoch: int) -> Units:
    tagged, row_starts = _pack(samples, ids, config, epoch)
    num_rows = len(row_starts) - 1
    starts = np.arange(num_rows + 1, dtype=np.int64)
    if config.micro_batches_per_step is not None:
        tagged, row_starts = take_segments(tagged, row_starts, keyed_order(num_rows, config.seed, epoch, "rows"))
        whole = np.array([0, num_rows], dtype=np.int64)
        starts = starts_of(np.bincount(join_rows(samples, tagged >> LENGTH_BITS, row_starts, whole, config)))
    costs = np.zeros(len(starts) - 1, dtype=np.int64)
    cost_of = balance_cost(np.arange(int(samples.lengths.max()) + 1), config.pair_cost)
    jit.call("add_costs", costs, tagged, row_starts[starts], cost_of, num=len(tagged))
    tagged >>= LENGTH_BITS
    return Units(tagged, starts, costs, np.array([0, len(costs)], dtype=np.int64), row_starts)


def _pack(samples: Samples, ids: Ints, config: PlanConfig, epoch: int) -> tuple[Ints, Ints]:
    """Best fit into rows of `row_cells`: the samples row by row, tagged with their lengths, and the row starts.

    Id and length are in one integer, because looking up the length of a random id is the main cost with many samples.
    """
    assert config.row_cells is not None
    # A row that can hold everything has room for every sample, so the table need not be larger than that.
    capacity = min(config.row_cells, int(samples.lengths.sum(dtype=np.int64)))
    tagged = ids << LENGTH_BITS
    tagged |= samples.lengths if len(ids) == len(samples.lengths) else samples.lengths[ids]
    tagged = _filler_last(
        keyed_shuffle(ids, config.seed, epoch, "sample order", values=tagged), int(samples.lengths.max())
    )
    sizes, limits = _extra_table(samples, tagged, config)
    most_rows = len(ids)
    if not len(limits):  # any two rows together hold more than one row can, else the second would not have been opened
        most_rows = min(most_rows, 2 * int(samples.lengths.sum(dtype=np.int64)) // capacity + 2)
    bases, num_words = _levels(capacity)
    row_of = np.empty(len(ids), dtype=np.int64)
    heads, following = (np.full(num, -1, dtype=np.int64) for num in (capacity + 1, most_rows))
    bits, used = (np.zeros(num, dtype=np.int64) for num in (num_words, most_rows * len(limits)))
    num_rows = jit.call(
        "best_fit", row_of, heads, following, bits, used, bases, tagged, sizes, limits, capacity, num=len(ids)
    )
    return stable_sort(tagged, row_of, num_rows)


def _extra_table(samples: Samples, tagged: Ints, config: PlanConfig) -> Table:
    """Totals of fixed rows other than cells; nothing if only cells have a limit."""
    if config.pairs is None and config.samples is None and not config.costs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    costs = {name: column[tagged >> LENGTH_BITS] for name, column in samples.costs.items()}
    limits = MicroBatchLimits(pairs=config.pairs, samples=config.samples, costs=config.costs)
    return packed_table(tagged & LONGEST, costs, limits)


def _levels(capacity: int) -> tuple[Ints, int]:
    """Start of each level of the free-space bitmap, 32 entries per word, and the words of all levels."""
    bases, num_words, num = [0], 0, capacity + 2
    while True:
        words = num // 32 + 2
        num_words += words
        if words <= 2:
            return np.array(bases, dtype=np.int64), num_words
        bases.append(num_words)
        num = words


def _filler_last(tagged: Ints, longest_sample: int) -> Ints:
    """Samples in the given random order, except that the shortest come last, roughly longest first.

    They fill the remaining space. Sorting all, or these strictly, would group the same samples in every epoch.
    """
    counts = np.zeros(longest_sample + 1, dtype=np.int64)
    jit.call("count_lengths", counts, tagged, num=len(tagged))
    tokens = np.cumsum(counts * np.arange(len(counts)))  # [length] of all samples up to this length
    longest = int(np.searchsorted(tokens, tokens[-1] // _FILLER_SHARE, side="right")) - 1
    starts, ordered = np.zeros(2 * longest + 3, dtype=np.int64), np.empty_like(tagged)
    jit.call("sort_filler", ordered, starts, tagged, longest, num=len(tagged))
    return ordered


def _form_padded(samples: Samples, ids: Ints, config: PlanConfig, epoch: int) -> Units:
    buckets = np.zeros(len(ids), dtype=np.int64)
    if config.grouping == "budget":
        ids = _alike(samples, ids, config, epoch)
        buckets[: _first_boundary(samples, ids, config, epoch)] = 1
    else:
        ids = keyed_sample_order(ids, config, epoch)
    if config.grouping == "bucketed":
        ids, buckets = by_bucket(samples, ids, buckets, config.bucket_width)
    whole = np.array([0, len(ids)], dtype=np.int64)
    return padded_units(samples, ids, whole, buckets, config, ranks=1, is_even=False)


def _first_boundary(samples: Samples, ids: Ints, config: PlanConfig, epoch: int) -> int:
    """A random upper bound for the end of the first micro-batch, so that all later boundaries move with it."""
    shortest = int(samples.lengths[ids[0]])
    most = min(len(ids), config.samples or len(ids), (config.cells or len(ids) * shortest) // shortest)
    return 1 + int(keyed_hash(config.seed, epoch, "first boundary", [0])[0]) % max(1, most)


def _alike(samples: Samples, ids: Ints, config: PlanConfig, epoch: int) -> Ints:
    """Sort by length with a little keyed noise, shortest first: neighbours have similar lengths but change every
    epoch."""
    noise = keyed_hash(config.seed, epoch, "alike", ids)
    key = samples.lengths[ids].astype(np.uint64) << np.uint64(_FRACTION_BITS)
    key += (key * (noise >> np.uint64(48))) >> np.uint64(16 + _JITTER_BITS)
    key = (key << np.uint64(_HASH_BITS)) | (noise & np.uint64((1 << _HASH_BITS) - 1))
    return ids[np.argsort(key, kind="stable")]


def _emptiest_last(samples: Samples, units: Units, chosen: Ints, size: int, config: PlanConfig) -> Ints:
    """Keep the random order, but move the emptiest units, which would not fill a step, to the end."""
    tokens = segment_sums(samples.lengths[units.order], units.sample_starts)
    if units.row_starts is not None:
        assert config.row_cells is not None
        cells = np.diff(units.starts) * config.row_cells
    else:
        cells = np.diff(units.starts) * segment_maxima(samples.lengths[units.order], units.starts)
    spare = len(chosen) % size or (size if len(chosen) > size else 0)
    emptiest = np.argsort((cells - tokens)[chosen], kind="stable")
    is_last = np.zeros(len(chosen), dtype=bool)
    is_last[emptiest[len(chosen) - spare :]] = True
    return np.concatenate([chosen[~is_last], chosen[is_last]])
