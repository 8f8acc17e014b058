"""Cut a micro-batch that is already tensors into smaller ones, without reading a sample again.

tensors -> the values of every sample -> `collate` on each part: what the loader would have made of those samples
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from truebatch.batch.collate import collate
from truebatch.batch.fields import Field, Side
from truebatch.batch.microbatch import CELLS, FlatAxis, MicroBatch, RowAxis
from truebatch.planning.rows import Ints, Rows, packed_row, padded_rows

Sample = dict[str, Any]


def cells_of(batch: MicroBatch) -> int:
    """The size of a micro-batch as one number that shrinks with every cut: cells and entries of all its axes.

    The number of samples if no field has variable length.
    """
    sizes = [len(a.owner) if isinstance(a, FlatAxis) else a.segments.num_cells for a in batch.axes.values()]
    return sum(sizes) or batch.num_samples


def halve_microbatch(batch: MicroBatch, fields: Sequence[Field]) -> list[MicroBatch]:
    """Two micro-batches with about half the tokens each, in the same order; a single sample stays as it is.

    Several packed rows are split between rows; a single one between samples, and its parts have as many cells as
    tokens. The plan's counts belong to the whole micro-batch and are not passed on.
    """
    if batch.num_samples < 2:
        return [batch]
    rows = rows_of_batch(batch, fields)
    lengths = _lengths(batch, fields)
    cut = _middle(np.cumsum(lengths), rows)
    samples, make = samples_of(batch, fields), _maker(batch, fields)
    parts = (slice(0, cut), slice(cut, None))
    return [make(samples[part], _part_of(rows, part, lengths[part])) for part in parts]


def split_microbatch(
    batch: MicroBatch, fields: Sequence[Field], *, fits: Callable[[MicroBatch], bool]
) -> list[MicroBatch]:
    """The same samples in the same order, halved until every part fits or is a single sample."""
    if batch.num_samples < 2 or fits(batch):
        return [batch]
    return [part for half in halve_microbatch(batch, fields) for part in split_microbatch(half, fields, fits=fits)]


def leave_out(batch: MicroBatch, fields: Sequence[Field], *, ids: frozenset[int]) -> list[MicroBatch]:
    """The micro-batch without these samples; an empty list if nothing is left."""
    kept = [at for at, sample_id in enumerate(batch.sample_ids) if sample_id not in ids]
    if len(kept) == batch.num_samples:
        return [batch]
    return take_samples(batch, fields, kept)


def take_samples(batch: MicroBatch, fields: Sequence[Field], places: Sequence[int]) -> list[MicroBatch]:
    """The samples at these positions as one micro-batch with rows as narrow as possible; an empty list for no
    positions."""
    if not places:
        return []
    samples, lengths = samples_of(batch, fields), _lengths(batch, fields)[list(places)]
    ids = np.array([batch.sample_ids[at] for at in places], dtype=np.int64)
    is_packed = rows_of_batch(batch, fields).layout == "packed"
    rows = packed_row(ids, int(lengths.sum())) if is_packed else padded_rows(ids, int(lengths.max(initial=0)))
    return [_maker(batch, fields)([samples[at] for at in places], rows)]


def keep_samples(batch: MicroBatch, fields: Sequence[Field], places: Sequence[int]) -> MicroBatch:
    """The samples at these places in the rows they lie in, as wide as they were, with the cells of the others empty.

    >>> import numpy as np
    >>> from truebatch import Field, collate
    >>> from truebatch.planning.rows import padded_rows
    >>> batch = collate([{"x": [1, 2, 3]}, {"x": [4]}, {"x": [5, 6]}], padded_rows(np.arange(3), 3), [Field(name="x")])
    >>> keep_samples(batch, [Field(name="x")], [1, 2])["x"].tolist()
    [[4, 0, 0], [5, 6, 0]]
    """
    rows, samples = rows_of_batch(batch, fields), samples_of(batch, fields)
    ids = np.array([batch.sample_ids[at] for at in places], dtype=np.int64)
    row_of = np.repeat(np.arange(rows.num_rows), np.diff(rows.starts))[list(places)]
    _, held = np.unique(row_of, return_counts=True)
    starts = np.concatenate([[0], np.cumsum(held)]).astype(np.int64)
    kept = Rows(ids, starts, rows.width, rows.layout)
    return _maker(batch, fields)([samples[at] for at in places], kept)


def sample_alone(batch: MicroBatch, fields: Sequence[Field], place: int) -> MicroBatch:
    """The sample at this place as one-by-one training would see it: a padded row of its own, without padding."""
    ids = np.array([batch.sample_ids[place]], dtype=np.int64)
    final = [replace(f, source="", shift=0, dtype="keep") for f in fields]
    width = int(_lengths(batch, fields)[place])
    return collate([samples_of(batch, fields)[place]], padded_rows(ids, width), final)


def samples_of(batch: MicroBatch, fields: Sequence[Field]) -> list[Sample]:
    """The values of every sample, as the fields of the micro-batch hold them (shifted, in their final dtype)."""
    columns = {f.name: _values(batch, f) for f in fields}
    return [{name: column[at] for name, column in columns.items()} for at in range(batch.num_samples)]


def _values(batch: MicroBatch, field: Field) -> list[Any]:
    if field.kind == "once":
        return list(batch[field.name].unbind())
    axis = batch.axes[field.inner or field.axis]
    values = batch[field.name]
    parts = list(torch.split(axis.take_tokens(values) if isinstance(axis, RowAxis) else values, list(axis.lengths)))
    if field.kind != "nested":
        return parts
    bounds = np.cumsum([0, *batch.rows(field.axis).lengths]).tolist()
    return [parts[a:b] for a, b in pairwise(bounds)]


def _maker(batch: MicroBatch, fields: Sequence[Field]) -> Callable[[Sequence[Mapping[str, Any]], Rows], MicroBatch]:
    """Collate as the loader did; the values are final already."""
    final = [replace(f, source="", shift=0, dtype="keep") for f in fields]
    outer = _outer_axis(batch, fields)
    side: Side = "right" if outer is None else outer.segments.side
    slots = _slots(batch)
    is_pinned = any(t.is_pinned() for t in batch.fields.values())

    def make(samples: Sequence[Mapping[str, Any]], rows: Rows) -> MicroBatch:
        part = collate(samples, rows, final, side=side, slots=slots)
        return part.pin_memory() if is_pinned else part

    return make


def rows_of_batch(batch: MicroBatch, fields: Sequence[Field]) -> Rows:
    """Which sample is in which row, as the micro-batch records it."""
    axis = _outer_axis(batch, fields)
    ids = np.asarray(batch.sample_ids, dtype=np.int64)
    if axis is None:
        return padded_rows(ids, 1)
    if axis.segments.layout == "padded":
        return padded_rows(ids, axis.shape[1])
    return Rows(ids, np.array(axis.row_starts, dtype=np.int64), axis.shape[1], "packed")


def _outer_axis(batch: MicroBatch, fields: Sequence[Field]) -> RowAxis | None:
    """An axis laid out by the plan's rows: `cells` if there is one. Inner levels have rows of their own."""
    names = [f.axis for f in fields if f.kind in ("along", "nested")]
    name = CELLS if CELLS in names else next(iter(names), None)
    return None if name is None else batch.rows(name)


def _slots(batch: MicroBatch) -> int | None:
    """Entries of the segment table of one packed row, if it was fixed."""
    axis = batch.axes.get(CELLS)
    if not isinstance(axis, RowAxis) or axis.segments.layout != "packed":
        return None
    entries = len(axis.segments.starts) - 1
    return None if entries == len(axis.segments.lengths) else entries // axis.shape[0]


def _lengths(batch: MicroBatch, fields: Sequence[Field]) -> Ints:
    axis = _outer_axis(batch, fields)
    return np.ones(batch.num_samples, dtype=np.int64) if axis is None else np.array(axis.lengths, dtype=np.int64)


def _middle(running: Ints, rows: Rows) -> int:
    """The cut nearest to half the tokens: between rows if there are several, with a sample on either side."""
    inside = rows.starts[(rows.starts > 0) & (rows.starts < rows.num_samples)]
    places = inside if len(inside) else np.arange(1, rows.num_samples)
    return int(places[np.argmin(np.abs(running[places - 1] - running[-1] / 2))])


def _part_of(rows: Rows, part: slice, lengths: Ints) -> Rows:
    first, last, _ = part.indices(rows.num_samples)
    ids = rows.ids[first:last]
    if rows.layout == "padded":
        return padded_rows(ids, int(lengths.max(initial=0)))
    is_cut_between_rows = bool(((rows.starts > 0) & (rows.starts < rows.num_samples)).any())
    if not is_cut_between_rows:
        return packed_row(ids, int(lengths.sum()))
    inner = rows.starts[(rows.starts > first) & (rows.starts < last)] - first
    return Rows(ids, np.array([0, *inner.tolist(), last - first], dtype=np.int64), rows.width, "packed")
