"""Small tensors of a micro-batch lie in one piece of memory and go to a device by one copy: the same numbers, each its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch import Field, collate
from truebatch.planning.rows import packed_row, padded_rows
from truebatch.tensors import microbatch, together
from truebatch.tensors.together import ALIGNED, lay_together, send_together

CPU = torch.device("cpu")
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex128]  # fmt: skip
FIELDS = [
    Field(name="input_ids"),
    Field(name="labels", source="input_ids", pad=-100, blank=-100),
    Field(name="weight", kind="once", dtype="float32"),
]


def make_batch(layout="packed"):
    samples = [{"input_ids": np.arange(n) + 3, "weight": n / 2} for n in (4, 3, 1)]
    rows = packed_row(np.arange(3), 10) if layout == "packed" else padded_rows(np.arange(3), 4)
    return collate(samples, rows, FIELDS)


def tensors_of(batch):
    return list(microbatch._tensors(batch))


def without_pinning(monkeypatch):
    monkeypatch.setattr(microbatch, "lay_together", lambda tensors: lay_together(tensors, pin=False))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=2, max_size=12),
    st.integers(0, 2**31),
)
def test_every_tensor_comes_out_as_it_went_in(kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 2, shape, generator=generator).to(dtype) for dtype, shape in kinds]
    held, laid = lay_together(tensors, pin=False)
    for tensor in tensors:
        assert (id(tensor) in laid) == (held is not None and tensor.numel() > 0)
    if held is None:
        return
    there = send_together(held, laid.values(), CPU, non_blocking=False)
    for tensor in tensors:
        if tensor.numel():
            for found in (laid[id(tensor)], there[id(laid[id(tensor)])]):
                assert found.dtype == tensor.dtype
                assert torch.equal(found, tensor)
                assert found.storage_offset() * found.element_size() % ALIGNED == 0
                assert found.is_contiguous()


def test_a_write_into_one_counts_for_that_one_alone():
    one, other = torch.arange(3), torch.arange(3, 6)
    held, laid = lay_together([one, other], pin=False)
    sent = send_together(held, laid.values(), CPU, non_blocking=False)
    for pair in ([laid[id(one)], laid[id(other)]], list(sent.values())):
        before = pair[1]._version
        pair[0].mul_(2)
        assert pair[1]._version == before
        assert torch.equal(pair[1], other)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(together.MOST_BYTES + 1, dtype=torch.uint8),
        torch.zeros(0),
        torch.zeros(4, 4).t()[1:],
        torch.zeros(3, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.nn.Parameter(torch.zeros(3), requires_grad=False),
    ],
    ids=["large", "empty", "not in a row", "with a gradient", "sparse", "elsewhere", "of another class"],
)
def test_what_is_not_small_and_plain_is_left_out(tensor):
    plain = [torch.zeros(2), torch.ones(2)]
    _, laid = lay_together([*plain, tensor], pin=False)
    assert set(laid) == {id(one) for one in plain}
    assert lay_together([plain[0], tensor], pin=False) == (None, {})


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_micro_batch_is_the_same_and_knows_where_it_lies(monkeypatch, layout):
    without_pinning(monkeypatch)
    batch = make_batch(layout)
    pinned = batch.pin_memory()
    assert pinned.held is not None
    assert len(tensors_of(pinned)) == len(tensors_of(batch)) == 8
    for one, other in zip(tensors_of(batch), tensors_of(pinned), strict=True):
        assert torch.equal(one, other)
        assert other.untyped_storage().data_ptr() == pinned.held.data_ptr()
    there = pinned.to("meta")
    assert there.held is None
    assert [(t.shape, t.dtype, t.device.type) for t in tensors_of(there)] == [
        (t.shape, t.dtype, "meta") for t in tensors_of(batch)
    ]
    assert len({t.untyped_storage()._cdata for t in tensors_of(there)}) == 1
    assert pinned.to("cpu")["input_ids"] is pinned["input_ids"]


def test_a_field_that_was_exchanged_afterwards_goes_by_itself(monkeypatch):
    without_pinning(monkeypatch)
    pinned = make_batch().pin_memory()
    changed = replace(pinned, fields={**pinned.fields, "input_ids": torch.full((1, 10), 7)})
    sent = send_together(changed.held, tensors_of(changed), CPU, non_blocking=False)
    assert id(changed["input_ids"]) not in sent
    assert id(changed["labels"]) in sent
    assert changed.to("meta")["input_ids"].shape == (1, 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_card_gets_a_micro_batch_by_one_copy_and_one_for_its_labels():
    pinned = make_batch().pin_memory()
    assert pinned.held.is_pinned()
    assert all(t.is_pinned() for t in tensors_of(pinned))
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        there = pinned.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    copies = sum(event.count for event in profile.key_averages() if "Memcpy HtoD" in event.key)
    assert copies == 2
    for one, other in zip(tensors_of(pinned), tensors_of(there), strict=True):
        assert torch.equal(one, other.cpu())
    assert torch.equal(there.filled_cells("labels").cpu(), pinned.filled_cells("labels"))
    there["input_ids"].add_(1)  # of one field alone
    assert torch.equal(there["labels"].cpu(), pinned["labels"])
    assert there.filled_cells("labels") is not None
