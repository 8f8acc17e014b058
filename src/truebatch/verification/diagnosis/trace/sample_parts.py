"""Where a sample lies in a tensor of a micro-batch, told from the shape that the same tensor has for the sample alone.

shape alone, shape together, where the sample is -> for every axis an index and what kind of axis it is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from truebatch.batch.microbatch import FlatAxis, MicroBatch, RowAxis

ROW, CELLS, FLAT, ENTRIES, SAME = "row", "cells", "flat", "entries", "same"
"""FLAT: the cells of all rows, or the tokens of all samples, one after another. ENTRIES: those of a flat field."""
NO_ROWS = -1
"""The width of an axis whose entries lie end to end."""
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """The sample on one variable-length axis."""

    length: int
    width: int
    """Cells of a row; `NO_ROWS` where samples lie end to end."""
    start: int
    before: int
    """Tokens of the samples before it."""
    total: int
    """Tokens of all samples."""


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """Where one sample is in a micro-batch."""

    row: int
    rows: int
    at: int
    """Its number among the samples."""
    samples: int
    spans: tuple[AxisSpan, ...]
    from_right: bool
    """True if padding comes first."""


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a tensor that belongs to a sample."""

    index: Index
    kinds: tuple[str, ...]
    """row, cells, flat, entries or same, for every axis."""


def place_in(batch: MicroBatch, sample: int, side: str) -> SamplePlace:
    """Where a sample of this id is."""
    at = batch.sample_ids.index(sample)
    row, rows, spans = at, batch.num_samples, []
    for axis in batch.axes.values():
        if isinstance(axis, FlatAxis) and len(axis.lengths) == batch.num_samples:
            before = sum(axis.lengths[:at])
            spans.append(AxisSpan(axis.lengths[at], NO_ROWS, before, before, sum(axis.lengths)))
        elif isinstance(axis, RowAxis) and len(axis.lengths) == batch.num_samples:
            B, T = axis.shape
            before = sum(axis.lengths[:at])
            first = int(axis.cell_of_token[before]) if axis.lengths[at] else 0
            row, rows = (first // T, B) if axis.lengths[at] else (row, B)
            spans.append(AxisSpan(axis.lengths[at], T, first % T, before, sum(axis.lengths)))
    return SamplePlace(row, rows, at, batch.num_samples, tuple(spans), side == "left")


def match_shapes(alone: Sequence[int], together: Sequence[int], place: SamplePlace) -> Match | None:
    """The sample's part of a tensor whose shape is `alone` for the sample alone; None if it cannot be told."""
    if len(alone) != len(together):
        return None
    index, kinds = [], []
    has_rows = False
    for a, b in zip(alone, together, strict=True):
        found = _axis(a, b, place, is_free=not has_rows)
        if found is None:
            return None
        index.append(found[0])
        kinds.append(found[1])
        has_rows |= found[1] in (ROW, FLAT, ENTRIES)
    return Match(tuple(index), tuple(kinds))


def take_part(tensor: Tensor, match: Match) -> Tensor:
    """That part."""
    return tensor[match.index] if match.index else tensor


def _axis(a: int, b: int, place: SamplePlace, *, is_free: bool) -> tuple[slice, str] | None:
    for span in place.spans:
        if (a, b) == (span.length, span.width):
            return slice(span.start, span.start + a), CELLS
        if span.width == NO_ROWS and (a, b) == (span.length, span.total) and a != b:
            return slice(span.before, span.before + a), ENTRIES
    if a == b:
        return slice(None), SAME
    if is_free and place.rows > 1 and b == a * place.rows:
        return slice(place.row * a, (place.row + 1) * a), ROW
    if is_free and place.samples > 1 and b == a * place.samples:
        return slice(place.at * a, (place.at + 1) * a), ROW
    for span in place.spans:
        if (a, b) == (span.length, span.width * place.rows):
            first = place.row * span.width + span.start
            return slice(first, first + a), FLAT
        if (a, b) == (span.length, span.total):
            return slice(span.before, span.before + a), FLAT
    if b < a or place.rows == 1 < place.samples:
        return None
    return (slice(b - a, b) if place.from_right else slice(0, a)), CELLS
