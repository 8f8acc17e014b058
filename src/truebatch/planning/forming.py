"""Rows and micro-batches formed over a whole epoch, then dealt to steps at random.

fresh random order -> packed rows or padded micro-batches of alike lengths -> steps
"""

from __future__ import annotations

import numpy as np

from truebatch.planning import compiled
from truebatch.planning.cutting import by_bucket, keyed_sample_order, padded_units
from truebatch.planning.dealing import Units, join_rows, make_units, take_units
from truebatch.planning.keyed import keyed_hash, keyed_order
from truebatch.planning.resources import extra_table
from truebatch.planning.rows import Ints
from truebatch.planning.samples import Samples
from truebatch.planning.segments import (
    chunk_starts,
    segment_maxima,
    segment_sums,
    stable_order,
    starts_of,
    take_segments,
)
from truebatch.planning.settings import PlanConfig

_BIG_SHARE = 16
"""Samples longer than this part of a row are packed first and in random order, the rest longest first."""
_JITTER_BITS = 8
"""Padded: samples whose lengths differ by less than one part in 2**8 may change places from epoch to epoch."""
_FRACTION_BITS = 6
_HASH_BITS = 27


def form_units(samples: Samples, ids: Ints, config: PlanConfig, epoch: int, *, fullest_first: bool = False) -> Units:
    """Units of the whole epoch, dealt to steps: at random, or (for streams) the emptiest left for the end."""
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
    order, row_starts = _pack(samples, ids, config, epoch)
    num_rows = len(row_starts) - 1
    starts = np.arange(num_rows + 1, dtype=np.int64)
    if config.micro_batches_per_step is not None:
        shuffled = keyed_order(num_rows, config.seed, epoch, "rows")
        order, row_starts = take_segments(order, row_starts, shuffled)
        groups = join_rows(samples, order, row_starts, np.array([0, num_rows], dtype=np.int64), config)
        starts = starts_of(np.bincount(groups))
    return make_units(samples, order, starts, np.array([0, len(starts) - 1]), config, row_starts)


def _pack(samples: Samples, ids: Ints, config: PlanConfig, epoch: int) -> tuple[Ints, Ints]:
    """Best fit into rows of `row_cells`: the samples row after row, and where each row begins."""
    capacity = config.row_cells
    assert capacity is not None
    ids = _big_first(samples, keyed_sample_order(ids, config, epoch), capacity)
    lengths = samples.lengths[ids].astype(np.int64)
    costs = {name: column[ids] for name, column in samples.costs.items()}
    sizes, limits = extra_table(lengths, costs, config.limits)
    bases, num_words = _levels(capacity)
    row_of = np.zeros(len(ids), dtype=np.int64)
    heads = np.full(capacity + 1, -1, dtype=np.int64)
    following = np.full(len(ids), -1, dtype=np.int64)
    used = np.zeros(len(ids) * len(limits), dtype=np.int64)
    num_rows = compiled.call(
        "best_fit", row_of, heads, following, np.zeros(num_words, dtype=np.int64), used,
        bases, lengths, sizes, limits, capacity, num=len(ids),
    )  # fmt: skip
    order, row_starts = stable_order(row_of, num_rows)
    return ids[order], row_starts


def _levels(capacity: int) -> tuple[Ints, int]:
    """Where each level of the table of free spaces begins, 32 entries a word, and the words of all levels."""
    bases, num_words, num = [0], 0, capacity + 2
    while True:
        words = num // 32 + 2
        num_words += words
        if words <= 2:
            return np.array(bases, dtype=np.int64), num_words
        bases.append(num_words)
        num = words


def _big_first(samples: Samples, ids: Ints, capacity: int) -> Ints:
    """Big samples in the given order, then small ones longest first (equal ones in the given order).

    Longest first leaves big samples only one way to combine; small ones last fill what is left.
    """
    small = capacity // _BIG_SHARE
    key = np.maximum(0, small + 1 - samples.lengths[ids].astype(np.int64))
    return ids[stable_order(key, small + 1)[0]]


def _form_padded(samples: Samples, ids: Ints, config: PlanConfig, epoch: int) -> Units:
    buckets = np.zeros(len(ids), dtype=np.int64)
    arrange = _alike if config.grouping == "budget" else _shuffled
    ids = arrange(samples, ids, config, epoch)
    if config.grouping == "bucketed":
        ids, buckets = by_bucket(samples, ids, buckets, config.bucket_width)
    whole = np.array([0, len(ids)], dtype=np.int64)
    return padded_units(samples, ids, whole, buckets, config, ranks=1, is_even=False)


def _shuffled(_: Samples, ids: Ints, config: PlanConfig, epoch: int) -> Ints:
    return keyed_sample_order(ids, config, epoch)


def _alike(samples: Samples, ids: Ints, config: PlanConfig, epoch: int) -> Ints:
    """Longest first by a length with a little keyed noise, so that neighbours are alike but new every epoch."""
    noise = keyed_hash(config.seed, epoch, "alike", ids)
    key = samples.lengths[ids].astype(np.uint64) << np.uint64(_FRACTION_BITS)
    key += (key * (noise >> np.uint64(48))) >> np.uint64(16 + _JITTER_BITS)
    key = (key << np.uint64(_HASH_BITS)) | (noise & np.uint64((1 << _HASH_BITS) - 1))
    return ids[np.argsort(key, kind="stable")[::-1]]


def _emptiest_last(samples: Samples, units: Units, chosen: Ints, size: int, config: PlanConfig) -> Ints:
    """Keep the random order, but move the units that would not fill a step, the emptiest, to the end."""
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
