"""A micro-batch cut as tensors is what `collate` makes of the same samples."""

from __future__ import annotations

from dataclasses import fields as attributes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.test_collate import fields_with, placed, ragged
from truebatch.batch.collate import collate
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import FlatAxis, MicroBatch
from truebatch.batch.split import (
    cells_of,
    halve_microbatch,
    leave_out,
    rows_of_batch,
    samples_of,
    split_microbatch,
    take_samples,
)
from truebatch.planning.rows import Rows, packed_row, padded_rows

FIELDS = fields_with(1, -7, "int64")
FINAL = [Field(**{a.name: getattr(f, a.name) for a in attributes(Field)} | {"source": "", "shift": 0}) for f in FIELDS]


def same(got: MicroBatch, want: MicroBatch) -> None:
    assert got.sample_ids == want.sample_ids
    assert got.fields.keys() == want.fields.keys()
    for name, value in want.fields.items():
        same_tensor(got[name], value)
    assert got.blanks == want.blanks
    for name in want.blanks:
        assert torch.equal(got.filled_cells(name), want.filled_cells(name))
    assert got.axes.keys() == want.axes.keys()
    for name, axis in want.axes.items():
        same_axis(got.axes[name], axis)


def same_tensor(got, want):
    if want.numel():  # a part without a single entry has no data to take a dtype from
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    else:
        assert got.numel() == 0


def same_axis(got, want):
    assert type(got) is type(want)
    assert got.lengths == want.lengths
    if isinstance(want, FlatAxis):
        assert torch.equal(got.starts, want.starts)
        assert torch.equal(got.owner, want.owner)
        return
    assert got.row_starts == want.row_starts
    for name in ("segment_ids", "positions", "cell_of_token"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    for name in ("lengths", "is_sample", "max_length", "layout", "side", "shape"):
        assert getattr(got.segments, name) == getattr(want.segments, name), name
    assert torch.equal(got.segments.starts, want.segments.starts)
    assert torch.equal(got.segments.is_real, want.segments.is_real)


def expected_rows(rows: Rows, a: int, b: int, lengths: list[int]) -> Rows:
    """By hand: padded rows as wide as their longest, whole packed rows as they were, a part of a row without padding."""
    ids = rows.ids[a:b]
    if rows.layout == "padded":
        return padded_rows(ids, max(lengths[a:b]))
    inside = [s for s in rows.starts.tolist() if 0 < s < rows.num_samples]
    if not inside:
        return packed_row(ids, sum(lengths[a:b]))
    starts = [0, *(s - a for s in inside if a < s < b), b - a]
    return Rows(ids, np.array(starts), rows.width, "packed")


@settings(deadline=None, max_examples=50)
@given(data=st.data(), samples=ragged(), side=st.sampled_from(["left", "right"]), slots=st.sampled_from([None, 40]))
def test_values_and_rows_read_back_from_tensors_make_the_same_micro_batch(data, samples, side, slots):
    rows = data.draw(placed([len(s["ids"]) for s in samples]))
    batch = collate(samples, rows, FIELDS, side=side, slots=slots)
    same(collate(samples_of(batch, FIELDS), rows_of_batch(batch, FIELDS), FINAL, side=side, slots=slots), batch)


@pytest.mark.parametrize("starts", [(0, 1, 1), (0, 0, 1), (0, 0, 1, 1)])
def test_a_sample_without_tokens_stays_in_its_row(starts):
    """Rows without a cell: nothing in them tells which of them holds the sample."""
    sample = {"ids": [], "vectors": [], "patches": [], "label": [0, 0], "minute": [0], "events": [[0]]}
    batch = collate([sample], Rows(np.array([100]), np.array(starts), 0, "packed"), FIELDS)
    rows = rows_of_batch(batch, FIELDS)
    assert rows.starts.tolist() == list(starts)
    same(collate(samples_of(batch, FIELDS), rows, FINAL), batch)


@settings(deadline=None, max_examples=70)
@given(data=st.data(), samples=ragged(), side=st.sampled_from(["left", "right"]), slots=st.sampled_from([None, 40]))
def test_each_half_is_what_collate_makes_of_its_samples(data, samples, side, slots):
    samples = [s for s in samples if s["ids"]]
    lengths = [len(s["ids"]) for s in samples]
    rows = data.draw(placed(lengths))
    batch = collate(samples, rows, FIELDS, side=side, slots=slots)
    halves = halve_microbatch(batch, FIELDS)
    if len(samples) < 2:
        assert halves == [batch]
        return
    cut = halves[0].num_samples
    assert 0 < cut < len(samples)
    for half, (a, b) in zip(halves, [(0, cut), (cut, len(samples))], strict=True):
        planned = expected_rows(rows, a, b, lengths)
        same(half, collate(samples[a:b], planned, FIELDS, side=side, slots=slots))


@settings(deadline=None, max_examples=35)
@given(data=st.data(), samples=ragged(), limit=st.integers(1, 60))
def test_splitting_keeps_every_sample_once_in_order_and_the_limit_where_it_can_be_kept(data, samples, limit):
    rows = data.draw(placed([len(s["ids"]) for s in samples]))
    batch = collate(samples, rows, FIELDS)
    parts = split_microbatch(batch, FIELDS, fits=lambda part: cells_of(part) <= limit)
    assert sum((part.sample_ids for part in parts), ()) == batch.sample_ids
    assert all(part.num_samples <= 1 or cells_of(part) <= limit for part in parts)
    values = [value for part in parts for value in samples_of(part, FIELDS)]
    for got, want in zip(values, samples_of(batch, FIELDS), strict=True):
        for name in ("ids", "labels", "vectors", "patches", "label", "minute"):
            assert got[name].tolist() == want[name].tolist()
        assert [e.tolist() for e in got["events"]] == [e.tolist() for e in want["events"]]


@settings(deadline=None, max_examples=35)
@given(data=st.data(), samples=ragged(), out=st.sets(st.integers(0, 6)))
def test_leaving_samples_out_gives_the_micro_batch_of_the_others(data, samples, out):
    lengths = [len(s["ids"]) for s in samples]
    rows = data.draw(placed(lengths))
    batch = collate(samples, rows, FIELDS)
    ids = frozenset(int(rows.ids[i]) for i in out if i < len(samples))
    kept = [i for i in range(len(samples)) if rows.ids[i] not in ids]
    got = leave_out(batch, FIELDS, ids=ids)
    if not ids:
        assert got == [batch]
    elif not kept:
        assert got == []
    else:
        sizes = [lengths[i] for i in kept]
        wide = packed_row(rows.ids[kept], sum(sizes)) if rows.layout == "packed" else None
        want = collate([samples[i] for i in kept], wide or padded_rows(rows.ids[kept], max(sizes)), FIELDS)
        same(got[0], want)


def test_two_axes_of_equal_total_are_not_taken_for_each_other():
    """Three tokens as 2 + 1 and three sets as 1 + 2: only the declaration says which of them the events belong to."""
    fields = (Field(name="ids"), Field(name="events", kind="nested", axis="sets", inner="events"))
    samples = [{"ids": [1, 2], "events": [[3]]}, {"ids": [4], "events": [[5, 6], [7]]}]
    batch = collate(samples, padded_rows(np.array([0, 1]), 2), fields)
    first, second = halve_microbatch(batch, fields)
    assert first["events"].tolist() == [[3]]
    assert second["events"].tolist() == [[5, 6], [7, 0]]


def test_samples_without_a_ragged_field_are_halved_by_number():
    fields = (Field(name="x", kind="once"),)
    samples = [{"x": [float(i), 0.0]} for i in range(5)]
    batch = collate(samples, padded_rows(np.arange(5), 1), fields)
    assert cells_of(batch) == 5
    assert [part.num_samples for part in halve_microbatch(batch, fields)] in ([2, 3], [3, 2])
    assert take_samples(batch, fields, [4, 0])[0]["x"].tolist() == [[4.0, 0.0], [0.0, 0.0]]


@pytest.mark.gpu
def test_parts_of_a_pinned_micro_batch_are_pinned():
    fields = (Field(name="ids"),)
    batch = collate([{"ids": [1]}, {"ids": [2, 3]}], padded_rows(np.arange(2), 2), fields).pin_memory()
    assert all(part["ids"].is_pinned() for part in halve_microbatch(batch, fields))
