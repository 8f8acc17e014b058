"""Turn the samples of one micro-batch into tensors: one writer for padded and packed rows.

samples -> values of every field -> lengths of every axis, checked -> where each token goes -> tensors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truebatch.batch.field_values import read_nested, read_value, shift_tokens, stack_values, tokens_of
from truebatch.batch.fields import Field, Side, check_fields
from truebatch.batch.microbatch import CELLS, Axis, FlatAxis, MicroBatch, RowAxis
from truebatch.batch.segments import Segments, full_segment, packed_segments, padded_segments, stack_rows
from truebatch.errors import BatchError
from truebatch.planning.rows import Rows

Ints = NDArray[np.int64]
Values = dict[str, list[Any]]
"""Field name -> its value in every sample; a nested field has a list of inner values for each."""


def collate(
    samples: Sequence[Mapping[str, Any]],
    rows: Rows,
    fields: Sequence[Field],
    *,
    side: Side = "right",
    slots: int | None = None,
    counts: Mapping[str, int] | None = None,
) -> MicroBatch:
    """Write each sample into its row. Nothing is truncated, and no value depends on the other samples.

    Args:
        samples: in the order of `rows.ids`; each maps field names to lists, arrays or tensors.
        rows: which sample lies in which row; see `padded_rows`, `packed_row` or a plan's `step`.
        fields: what a sample is made of.
        side: where padded rows have their padding. Packed rows have it at the end.
        slots: entries of the segment table of packed rows, for shapes that never change.
        counts: what the loss terms are divided by, if the plan knows it.

    >>> import numpy as np
    >>> from truebatch import Field, collate
    >>> from truebatch.planning.rows import padded_rows
    >>> fields = [Field(name="ids"), Field(name="labels", source="ids", shift=1, pad=-100)]
    >>> batch = collate([{"ids": [5, 6, 7]}, {"ids": [8]}], padded_rows(np.array([0, 1]), 3), fields)
    >>> batch["labels"].tolist()
    [[6, 7, -100], [-100, -100, -100]]
    """
    check_fields(fields)
    _check_number(samples, rows)
    values = _read_all(samples, rows, fields)
    axes = _build_axes(values, rows, fields, side, slots)
    ids = tuple(int(i) for i in rows.ids)
    tensors = {f.name: _write(f, values[f.name], axes, ids) for f in fields}
    blanks = {f.name: _blank_of(f, f.blank, tensors[f.name]) for f in fields if f.blank is not None}
    return MicroBatch(tensors, axes, ids, dict(counts or {}), frozenset(f.name for f in fields if f.host), blanks)


def _check_number(samples: Sequence[Any], rows: Rows) -> None:
    if len(samples) != rows.num_samples:
        raise BatchError(
            "the number of samples does not match the rows",
            seen=f"{len(samples)} samples, rows for {rows.num_samples}",
            do="pass one sample per entry of rows.ids, in that order",
        )


def _read_all(samples: Sequence[Mapping[str, Any]], rows: Rows, fields: Sequence[Field]) -> Values:
    values: Values = {f.name: [] for f in fields}
    for sample_id, sample in zip(rows.ids.tolist(), samples, strict=True):
        for f in fields:
            if f.key not in sample:
                near = [f"did you mean {name!r}? " for name in get_close_matches(f.key, map(str, sample), n=1)]
                raise BatchError(
                    f"sample {sample_id} has no field {f.key!r}",
                    seen=f"fields {sorted(str(k) for k in sample)}",
                    do="".join(near) + "return every declared field from the dataset",
                )
            read = read_nested if f.kind == "nested" else read_value
            values[f.name].append(read(sample[f.key], f, sample_id))
    return values


def _build_axes(values: Values, rows: Rows, fields: Sequence[Field], side: Side, slots: int | None) -> dict[str, Axis]:
    """Every axis once, from the lengths its fields agree on; nested axes outer level first, then inner."""
    axes: dict[str, Axis] = {}
    for name, (first, lengths) in _agreed_lengths(values, rows, fields).items():
        if first.kind == "flat":
            axes[name] = _flat_axis(lengths)
        elif name == first.inner:
            axes[name] = replace(_row_axis(lengths, _one_each(lengths), "right", None), outer=first.axis)
        else:
            laid = _widened(rows, fields) if name == CELLS else rows
            axes[name] = _row_axis(lengths, laid, side, slots if name == CELLS else None, is_planned=name == CELLS)
    return axes


def _widened(rows: Rows, fields: Sequence[Field]) -> Rows:
    """Padded rows widened to what the fields require."""
    least = max(f.least_cells for f in fields)
    return replace(rows, width=least) if rows.layout == "padded" and least > rows.width else rows


def _agreed_lengths(values: Values, rows: Rows, fields: Sequence[Field]) -> dict[str, tuple[Field, Ints]]:
    agreed: dict[str, tuple[Field, Ints]] = {}
    for f in fields:
        for axis, lengths in _lengths(f, values[f.name]).items():
            first, known = agreed.setdefault(axis, (f, lengths))
            if not np.array_equal(known, lengths):
                _raise_disagreement(axis, (first, known), (f, lengths), _owners(axis, f, values[f.name], rows))
    return agreed


def _lengths(field: Field, values: list[Any]) -> dict[str, Ints]:
    if field.kind == "once":
        return {}
    outer = {field.axis: np.array([len(v) for v in values], dtype=np.int64)}
    if field.kind == "nested":
        outer[field.inner] = np.array([len(inner) for v in values for inner in v], dtype=np.int64)
    return outer


def _owners(axis: str, field: Field, values: list[Any], rows: Rows) -> Ints:
    """Which sample each entry of the lengths along `axis` belongs to: a set belongs to the sample that holds it."""
    return np.repeat(rows.ids, [len(v) for v in values]) if axis == field.inner else rows.ids


def _raise_disagreement(axis: str, one: tuple[Field, Ints], other: tuple[Field, Ints], owners: Ints) -> None:
    (first, known), (second, lengths) = one, other
    at = int(np.flatnonzero(known != lengths)[0])
    raise BatchError(
        f"fields along {axis!r} have different lengths in sample {int(owners[at])}",
        seen=f"{first.name}: {known[at]}, {second.name}: {lengths[at]}",
        do=f"make the dataset return {second.name!r} with one entry per {first.name!r} entry, or name another axis",
    )


def _one_each(lengths: Ints) -> Rows:
    """The inner level of a nested field: every set is a row of its own, in either layout."""
    number = len(lengths)
    width = int(lengths.max(initial=0))
    return Rows(np.arange(number, dtype=np.int64), np.arange(number + 1, dtype=np.int64), width, "padded")


def _flat_axis(lengths: Ints) -> FlatAxis:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    return FlatAxis(torch.from_numpy(starts), torch.from_numpy(owner), tuple(lengths.tolist()))


def _row_axis(lengths: Ints, rows: Rows, side: Side, slots: int | None, *, is_planned: bool = False) -> RowAxis:
    if rows.layout == "padded" and len(lengths) == 1 and (not is_planned or lengths[0] == rows.width > 0):
        return _full_row(int(lengths[0]), side)
    return _rows_axis(lengths, rows, side, slots, is_planned=is_planned)


def _full_row(length: int, side: Side) -> RowAxis:
    """What `_rows_axis` comes to for a sample that fills its row alone: one by one, every micro-batch is such a row."""
    cells = torch.arange(length)
    own = torch.ones(1, length, dtype=torch.int64)
    return RowAxis(full_segment(length, side), own, cells[None], cells, (length,), (0, 1))


def _rows_axis(lengths: Ints, rows: Rows, side: Side, slots: int | None, *, is_planned: bool) -> RowAxis:
    total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)  # [N + 1]
    used = np.diff(total[rows.starts])  # [B]
    width = rows.width if is_planned else int(used.max(initial=0))
    if is_planned:
        _check_width(lengths, used, rows)
    number = np.diff(rows.starts)  # samples per row
    row_of = np.repeat(np.arange(rows.num_rows), number)
    before = total[:-1]
    offset = before - np.repeat(total[rows.starts[:-1]], number)  # cells before it in its row
    if rows.layout == "padded" and side == "left":
        offset = width - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    cell = np.repeat(row_of * width + offset, lengths) + within
    place = np.arange(len(lengths)) - np.repeat(rows.starts[:-1], number) + 1
    segment_ids = np.zeros(rows.num_rows * width, dtype=np.int64)
    positions = np.zeros_like(segment_ids)
    segment_ids[cell] = np.repeat(place, lengths)
    positions[cell] = within
    shape = (rows.num_rows, width)
    return RowAxis(
        _segments(lengths, rows, width, side, slots),
        torch.from_numpy(segment_ids).view(shape),
        torch.from_numpy(positions).view(shape),
        torch.from_numpy(cell.astype(np.int64)),
        tuple(lengths.tolist()),
        tuple(rows.starts.tolist()),
    )


def _segments(lengths: Ints, rows: Rows, width: int, side: Side, slots: int | None) -> Segments:
    if rows.layout == "padded" or not rows.num_rows:
        return padded_segments(lengths, width, side)
    cuts = [lengths[a:b] for a, b in zip(rows.starts[:-1], rows.starts[1:], strict=True)]
    return stack_rows([packed_segments(cut, cells=width, slots=slots) for cut in cuts])


def _check_width(lengths: Ints, used: Ints, rows: Rows) -> None:
    over = np.flatnonzero(used > rows.width)
    if len(over) and rows.layout == "padded":
        at = int(over[0])
        raise BatchError(
            f"sample {int(rows.ids[at])} is longer than its row",
            seen=f"{lengths[at]} tokens, but the planned rows have {rows.width} cells",
            do="measure and plan again: the dataset changed since it was measured, or it is measured in another unit",
        )
    if len(over):
        row = int(over[0])
        raise BatchError(
            f"the samples of packed row {row} are longer than the row",
            seen=f"samples {rows.row(row)[:8].tolist()} have {used[row]} tokens together, the row {rows.width} cells",
            do="measure and plan again: the dataset changed since it was measured, or it is measured in another unit",
        )


def _write(field: Field, values: list[Any], axes: Mapping[str, Axis], ids: Sequence[int]) -> Tensor:
    if field.kind == "once":
        return stack_values(values, field, ids)
    axis = axes[field.inner or field.axis]
    if field.kind == "nested":
        ids = [owner for outer, owner in zip(values, ids, strict=True) for _ in outer]
        values = [v for outer in values for v in outer]
    tokens = tokens_of(values, field, ids)
    if field.shift:
        tokens = shift_tokens(tokens, axis.lengths, field)
    if isinstance(axis, FlatAxis):
        return tokens
    return axis.put_tokens(tokens, pad=field.pad)


def _blank_of(field: Field, blank: float, values: Tensor) -> float:
    if values.ndim > 2:
        raise BatchError(
            f"field {field.name!r} declares `blank`, so each of its entries must be one number",
            seen=f"entries of shape {tuple(values.shape[2:])}",
            do="leave `blank` out for it",
        )
    return blank
