"""Whether rounding explains a distance: by its size, and in half precision by fp32 where that leaves doubt."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from truebatch.hf.numerics import are_close, in_fp32

WANTED = torch.ones(4, dtype=torch.bfloat16)


def off(by):
    return WANTED.float() * (1 + by)


def never():
    raise AssertionError("fp32 was asked")


@pytest.mark.parametrize(("by", "is_close"), [(0.01, True), (0.5, False)])
def test_near_and_far_need_no_fp32(by, is_close):
    assert are_close(off(by), WANTED, never) is is_close
    assert are_close(off(by).float(), WANTED.float(), never) is False


@pytest.mark.parametrize(("true", "is_close"), [(0.1, True), (0.06, True), (0.04, False), (0.0, False)])
def test_in_doubt_the_quick_way_must_be_as_near_to_fp32_as_the_plain_one(true, is_close):
    assert are_close(off(0.1), WANTED, lambda: off(true)) is is_close
    assert not are_close(off(0.1), WANTED)


def test_without_room_for_fp32_doubt_is_a_no_and_other_errors_are_told():
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def broken():
        raise ValueError("no such thing")

    assert not are_close(off(0.1), WANTED, full)
    with pytest.raises(ValueError, match="no such thing"):
        are_close(off(0.1), WANTED, broken)


def test_what_is_not_a_number_is_not_close():
    assert not are_close(off(float("nan")), WANTED, lambda: off(0.1))


@pytest.mark.parametrize("fails", [False, True])
def test_weights_come_back_with_their_bits_and_can_still_be_trained(fails):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = [one.data_ptr() for one in model.parameters()]
    told = pytest.raises(ValueError, match="on the way") if fails else nullcontext()
    with torch.inference_mode(), told, in_fp32(model):
        assert {one.dtype for one in model.parameters()} == {torch.float32}
        if fails:
            raise ValueError("on the way")
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])
    assert [
        one.data_ptr() for one in model.parameters()
    ] == places  # nothing was made anew, for which there may be no room
    model(torch.randn(4, 3, dtype=torch.bfloat16)).sum().backward()
    assert all(one.grad is not None for one in model.parameters())
