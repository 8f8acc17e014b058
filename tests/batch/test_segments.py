"""Segments: where samples lie in rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.batch.segments import (
    PADDING_PIECE,
    Segments,
    cell_positions,
    packed_segments,
    padded_segments,
    segment_of_cell,
    table_segments,
)
from truebatch.errors import AttentionError, BatchError

some_lengths = st.lists(st.integers(0, 9), max_size=8)


def spans(segments: Segments) -> list[tuple[int, int]]:
    return list(pairwise(segments.starts.tolist()))


@settings(deadline=None, max_examples=60)
@given(some_lengths, st.integers(0, 30), st.integers(0, 4))
def test_a_packed_table_covers_every_cell_once_and_keeps_samples_in_order(lengths, extra, empty_slots):
    plain = packed_segments(lengths, cells=sum(lengths) + extra)
    slots = len(plain.lengths) + empty_slots
    segments = packed_segments(lengths, cells=sum(lengths) + extra, slots=slots)
    assert segments.starts.dtype == torch.int32
    assert len(segments.starts) == slots + 1
    assert spans(segments)[: len(plain.lengths)] == spans(plain)
    assert segments.starts[-1] == segments.num_cells == sum(lengths) + extra
    assert segments.sample_lengths == tuple(lengths)
    assert max((b - a for a, b in spans(segments)), default=0) <= segments.max_length
    assert int(segments.is_real.sum()) == sum(lengths)


@settings(deadline=None, max_examples=60)
@given(some_lengths, st.integers(0, 5), st.sampled_from(["right", "left"]))
def test_a_padded_table_puts_each_sample_on_its_own_row(lengths, extra, side):
    width = max(lengths, default=0) + extra
    segments = padded_segments(lengths, width, side)
    assert segments.shape == (len(lengths), width)
    for row, (length, start) in enumerate(zip(lengths, segments.sample_starts, strict=True)):
        assert start == row * width + (0 if side == "right" else width - length)
        real = torch.zeros(width, dtype=torch.bool)
        real[start - row * width : start - row * width + length] = True
        assert torch.equal(segments.is_real[row], real)
    assert segments.starts[-1] == len(lengths) * width


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 20), st.booleans())
def test_positions_restart_at_every_sample_and_are_0_in_padding(lengths, extra, packed):
    segments = packed_segments(lengths, cells=sum(lengths) + extra, slots=60) if packed else padded_segments(lengths, 9)
    expected = [0] * segments.num_cells
    for start, length in zip(segments.sample_starts, lengths, strict=True):
        expected[start : start + length] = range(length)
    owner = [number for number, (a, b) in enumerate(spans(segments)) for _ in range(b - a)]
    assert cell_positions(segments).flatten().tolist() == expected
    assert segment_of_cell(segments).flatten().tolist() == owner


def test_a_long_padding_tail_becomes_few_short_segments():
    segments = packed_segments([1, 2], cells=10_000)
    assert max(segments.lengths) == segments.max_length == PADDING_PIECE
    assert packed_segments([], cells=64).lengths == (64,)
    bounded = packed_segments([1, 2], cells=100, max_length=20)
    assert bounded.lengths == (1, 2, 20, 20, 20, 20, 17)


def test_a_bare_table_is_read_back_without_its_empty_slots():
    made = packed_segments([3, 4], cells=9, slots=7)
    read = table_segments(made.starts, shape=(1, 9), max_length=4)
    assert read.lengths == made.lengths == (3, 4, 2)
    assert read.starts is made.starts
    assert read.is_real.all()


@pytest.mark.parametrize(("starts", "longest"), [([0, 3, 5], 3), ([0, 3, 9], 5), ([0, 6, 3, 9], 6)])
def test_a_bare_table_that_does_not_cover_the_rows_is_refused(starts, longest):
    with pytest.raises(AttentionError, match="does not cover"):
        table_segments(torch.tensor(starts, dtype=torch.int32), shape=(1, 9), max_length=longest)


def test_fixed_shapes_do_not_depend_on_the_samples():
    first = packed_segments([3, 4], cells=16, slots=6, max_length=8)
    second = packed_segments([8, 1, 1], cells=16, slots=6, max_length=8)
    assert first.starts.shape == second.starts.shape
    assert first.shape == second.shape
    assert first.max_length == second.max_length == 8


def test_lengths_may_be_a_list_an_array_or_a_tensor():
    tables = [packed_segments(kind([2, 3])) for kind in (list, np.array, torch.tensor)]
    assert all(table.lengths == (2, 3) for table in tables)


def test_moving_keeps_the_host_numbers():
    moved = packed_segments([2, 3], cells=8).to("cpu", non_blocking=True)
    assert moved.lengths == (2, 3, 3)
    assert moved.starts.tolist() == [0, 2, 5, 8]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: packed_segments([3, -1]), "sample 1 has length -1"),
        (lambda: packed_segments([3.0, 1.0]), "float64"),
        (lambda: packed_segments([[1], [2]]), "shape (2, 1)"),
        (lambda: packed_segments([2**31]), "2,147,483,648 cells"),
        (lambda: packed_segments([3, 4], cells=6), "7 tokens, cells=6"),
        (lambda: packed_segments([3, 4, 5], slots=2), "3 segments"),
        (lambda: packed_segments([3, 4], max_length=3), "longest sample 4, max_length=3"),
        (lambda: padded_segments([3, 5], 4), "sample 1 has 5 cells, width=4"),
        (lambda: padded_segments([3], 4, side="up"), "side='up'"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_what_was_seen(build, words):
    with pytest.raises(BatchError) as caught:
        build()
    assert words in caught.value.seen
