"""Values: whatever a sample holds becomes one dtype, and no pad value is bent to fit."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.batch.field_values import read_nested, read_value, shift_tokens, stack_values, tokens_of
from truebatch.batch.fields import DTYPES, Field
from truebatch.errors import BatchError

X = Field(name="x")


def values(*given, field=X):
    return [read_value(v, field, at) for at, v in enumerate(given)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=5), st.sampled_from(DTYPES[1:]))
def test_a_declared_dtype_is_what_comes_out_however_many_samples_there_are(lists, dtype):
    field = Field(name="x", dtype=dtype)
    out = tokens_of(values(*lists, field=field), field)
    assert out.dtype == getattr(torch, dtype)
    assert torch.equal(out, torch.tensor([x for part in lists for x in part], dtype=torch.int64).to(out.dtype))


def test_numbers_of_python_become_what_torch_makes_of_them():
    for case in ([1, 2], [1.5, 2.0], [True, False], (1, 2), 3, 2.5, True):
        field = Field(name="x", kind="once")
        assert stack_values(values(case, field=field), field).dtype == torch.tensor(case).dtype


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_numbers_become_int64_from_arrays_and_tensors_alike(dtype):
    array = np.arange(3, dtype=dtype)
    out = tokens_of(values(array, torch.from_numpy(array)), X)
    assert out.dtype == torch.int64
    assert out.tolist() == [0, 1, 2, 0, 1, 2]


def test_an_empty_list_says_nothing_about_dtype_or_dimensions():
    wide = np.ones((2, 3), dtype=np.float32)
    for case in ([[], wide], [wide, []], [[], wide[:0]], [wide[:0], []]):
        out = tokens_of(values(*case), X)
        assert out.dtype == torch.float32
        assert out.shape[1:] == (3,)
    with pytest.raises(BatchError, match=r"\(4,\) in sample 0 and \(3,\) in sample 1"):
        tokens_of(values(np.ones((0, 4), dtype=np.float32), wide), X)


def test_a_gradient_does_not_travel_with_a_sample():
    assert not tokens_of(values(torch.ones(2, requires_grad=True)), X).requires_grad


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), st.integers(0, 5))
def test_a_shift_moves_entries_forward_within_each_sample_and_fills_its_end(lists, shift):
    field = Field(name="x", shift=shift, pad=-1)
    out = shift_tokens(tokens_of(values(*lists), field), [len(v) for v in lists], field)
    assert out.tolist() == [x for v in lists for x in v[shift:] + [-1] * min(shift, len(v))]


def test_a_shift_keeps_the_dimensions_behind_the_ragged_one():
    field = Field(name="x", shift=1, pad=0)
    out = shift_tokens(tokens_of(values([[1, 2], [3, 4]], [[5, 6]]), field), [2, 1], field)
    assert out.tolist() == [[3, 4], [0, 0], [0, 0]]


def test_bytes_can_have_a_negative_pad_if_the_declared_dtype_holds_it():
    stored = np.array([1, 2], dtype=np.uint8)
    wide = Field(name="x", shift=1, pad=-100, dtype="int64")
    assert shift_tokens(tokens_of(values(stored), wide), [2], wide).tolist() == [2, -100]
    with pytest.raises(BatchError, match=r"pad value of field 'x'.*\n  seen: pad=-100, dtype torch.uint8"):
        tokens_of(values(stored), Field(name="x", shift=1, pad=-100))


INF, NAN = float("inf"), float("nan")
INTO_WHOLE = [
    (-1, "uint8"),
    (256, "uint8"),
    (2**31, "int32"),
    (0.5, "int64"),
    (NAN, "int32"),
    (INF, "int64"),
    (2, "bool"),
]
INTO_REAL = [(1e10, "float16"), (1e39, "float32")]


@pytest.mark.parametrize(("pad", "dtype"), [*INTO_WHOLE, *INTO_REAL])
def test_a_pad_value_that_does_not_fit_is_refused(pad, dtype):
    field = Field(name="x", pad=pad, dtype=dtype)
    with pytest.raises(
        BatchError,
        match="pad value of field 'x' does not fit its dtype\n  seen: pad=" + re.escape(f"{pad}, dtype torch.{dtype}"),
    ):
        tokens_of(values([1, 0], field=field), field)


@pytest.mark.parametrize(("pad", "dtype"), [(255, "uint8"), (float("nan"), "float16"), (float("-inf"), "bfloat16")])
def test_a_pad_value_that_fits_is_taken(pad, dtype):
    field = Field(name="x", pad=pad, dtype=dtype)
    assert tokens_of(values([1, 0], field=field), field).dtype == getattr(torch, dtype)


def test_nested_values_may_be_arrays_of_any_kind():
    field = Field(name="x", kind="nested", axis="sets", inner="entries")
    for case in ([[1, 2], [3]], [np.array([1, 2]), torch.tensor([3])], ((1, 2), (3,))):
        assert [list(map(int, v)) for v in read_nested(case, field, 0)] == [[1, 2], [3]]
    assert len(read_nested(np.ones((2, 3)), field, 0)) == 2
