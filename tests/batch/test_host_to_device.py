"""Small tensors of a micro-batch lie in one piece of memory and go to a device by one copy: the same numbers, each its own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tests.data.texts import assert_same
from truebatch import Field, collate
from truebatch.batch import host_to_device, microbatch
from truebatch.batch.host_to_device import ALIGNED, LEAST_SHARE, coalesce_pinned
from truebatch.planning.rows import packed_row, padded_rows
from truebatch.training.memory.measure import CountStorages

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex128]  # fmt: skip
FIELDS = [
    Field(name="input_ids"),
    Field(name="labels", source="input_ids", pad=-100, blank=-100),
    Field(name="weight", kind="once", dtype="float32"),
    Field(name="kept", source="input_ids", host=True),
]
TOGETHER = ("input_ids", "labels")
"""Of the fields; and three tensors of the axis."""


def make_batch(layout="packed"):
    samples = [{"input_ids": np.arange(n) + 3, "weight": n / 2} for n in (4, 3, 1)]
    rows = packed_row(np.arange(3), 10) if layout == "packed" else padded_rows(np.arange(3), 4)
    return collate(samples, rows, FIELDS)


def tensors_of(batch):
    return list(microbatch._tensors(batch))


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


class Elsewhere:
    """A place that is not the host's, though it is: what goes there is copied."""

    def __init__(self, monkeypatch):
        self.copies = 0
        real = torch.Tensor.to

        def to(tensor, place, *args, **options):
            if place != torch.device("cuda"):
                return real(tensor, place, *args, **options)
            self.copies += 1
            return tensor.clone().detach().requires_grad_(tensor.requires_grad)

        monkeypatch.setattr(torch.Tensor, "to", to)


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(microbatch, "coalesce_pinned", lambda tensors: coalesce_pinned(tensors, pin=False))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    return Elsewhere(monkeypatch)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=2, max_size=12),
    st.integers(0, 2**31),
)
def test_every_tensor_comes_out_as_it_went_in(kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 2, shape, generator=generator).to(dtype) for dtype, shape in kinds]
    pieces, laid = coalesce_pinned(tensors, pin=False)
    found = [laid.take(tensor) for tensor in tensors]
    assert sum(one is not None for one in found) == sum(len(piece.members) for piece in pieces)
    for one, tensor in zip(found, tensors, strict=True):
        if one is None:
            continue
        assert one.dtype == tensor.dtype
        assert torch.equal(one, tensor)
        assert one.storage_offset() * one.element_size() % ALIGNED == 0
        assert one.is_contiguous()
    for piece in pieces:
        assert len(piece.members) > 1
        assert {memory_of(member) for member in piece.members} == {memory_of(piece.memory)}
        sizes = [member.nbytes for member in piece.members]
        assert min(sizes) * LEAST_SHARE >= max(sizes)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(host_to_device.MOST_BYTES + 1, dtype=torch.uint8),
        torch.zeros(0),
        torch.zeros(1),
        torch.zeros(4, 4).t()[1:],
        torch.zeros(20, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.zeros(20, device="meta"),
        torch.nn.Parameter(torch.zeros(20), requires_grad=False),
        torch.nested.nested_tensor([torch.zeros(3), torch.zeros(20)], layout=torch.jagged),
    ],
    ids=["large", "empty", "tiny", "not in a row", "leaf", "sparse", "elsewhere", "of another class", "jagged"],
)
def test_what_is_not_small_and_plain_is_left_out(tensor):
    plain = [torch.zeros(20), torch.ones(20)]
    _, laid = coalesce_pinned([*plain, tensor], pin=False)
    assert laid.take(tensor) is None
    assert all(laid.take(one) is not None for one in plain)
    assert coalesce_pinned([plain[0], tensor], pin=False)[0] == ()


def test_a_conjugate_is_left_out():
    plain = [torch.ones(4, dtype=torch.complex64) * 1j, torch.ones(4, dtype=torch.complex64)]
    lazy = plain[0].conj()
    _, laid = coalesce_pinned([*plain, lazy, lazy.imag], pin=False)
    assert laid.take(lazy) is None


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_micro_batch_is_the_same_and_needs_few_copies(card, layout):
    batch = make_batch(layout)
    pinned = batch.pin_memory()
    assert card.copies == 0
    there = pinned.to("cuda")
    assert card.copies == 4  # int64 of every cell; the table, which cells are real, one number a sample
    for moved in (pinned, there):
        assert [len(piece.members) for piece in moved.pieces] == [5]
        for one, other in zip(tensors_of(batch), tensors_of(moved), strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
        address = memory_of(moved.pieces[0].memory)
        assert all(memory_of(moved[name]) == address for name in TOGETHER)
        assert memory_of(moved["weight"]) != address
    assert there["kept"] is pinned["kept"] is batch["kept"]
    assert memory_of(there["labels"]) != memory_of(pinned["labels"])
    assert pinned.to("cpu")["input_ids"] is pinned["input_ids"]
    shapes = [(t.shape, t.dtype) for t in tensors_of(batch)]
    assert [(t.shape, t.dtype) for t in tensors_of(pinned.to("meta"))] == shapes


def test_a_write_into_one_field_is_seen_in_that_one_alone(card):
    batch = make_batch()
    for moved in (batch.pin_memory(), batch.pin_memory().to("cuda")):
        versions = [t._version for t in tensors_of(moved) if t is not moved["input_ids"]]
        moved["input_ids"].mul_(2)
        assert [t._version for t in tensors_of(moved) if t is not moved["input_ids"]] == versions
        for one, other in zip(tensors_of(batch), tensors_of(moved), strict=True):
            assert torch.equal(one, other) == (other is not moved["input_ids"])


def test_fields_that_were_exchanged_or_cut_afterwards_are_as_separate_as_before(card):
    pinned = make_batch().pin_memory()
    new = {"input_ids": torch.full((1, 10), 7), "targets": pinned["labels"][:, 1:], "twice": pinned["labels"]}
    there = replace(pinned, fields={**pinned.fields, **new}).to("cuda")
    assert torch.equal(there["input_ids"], new["input_ids"])
    assert len({memory_of(there[name]) for name in ("input_ids", "targets", "labels", "twice")}) == 4
    there["targets"].zero_()
    assert torch.equal(there["labels"], pinned["labels"])
    assert torch.equal(there["twice"], pinned["labels"])


def test_one_tensor_under_two_names_becomes_two(card):
    batch = make_batch()
    pinned = replace(batch, fields={**batch.fields, "again": batch["input_ids"]}).pin_memory()
    for moved in (pinned, pinned.to("cuda")):
        moved["again"].zero_()
        assert torch.equal(moved["input_ids"], batch["input_ids"])


def test_what_was_made_of_a_member_afterwards_is_not_lost(card):
    batch = make_batch()
    more = {"a": torch.ones(10), "b": torch.ones(10)}
    pinned = replace(batch, fields={**batch.fields, **more}).pin_memory()
    pinned["a"].requires_grad_()
    assert pinned.to("cuda")["a"].requires_grad
    assert not pinned.to("cuda")["b"].requires_grad
    pinned["b"].data = torch.full((10,), 5.0)
    assert pinned.to("cuda")["b"].eq(5).all()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_a_copy_of_one_with_a_leaf_has_a_leaf_of_its_own(card, way):
    batch = make_batch()
    pinned = replace(batch, fields={**batch.fields, "a": torch.ones(10), "b": torch.ones(10)}).pin_memory()
    pinned["a"].requires_grad_()
    found = way(pinned)["a"]
    found.sum().backward()
    assert found.grad is not None
    assert pinned["a"].grad is None


class Lazy(Mapping):
    """Fields that are made when they are asked for, and die soon after."""

    def __getitem__(self, name):
        return torch.full((1, 10), ord(name))

    def __iter__(self):
        return iter("abcdef")

    def __len__(self):
        return 6


def test_fields_that_are_made_on_demand_keep_their_values(card):
    pinned = replace(make_batch(), fields=Lazy(), blanks={}).pin_memory()
    for moved in (pinned, pinned.to("cuda")):
        assert {name: int(values.unique()) for name, values in moved.fields.items()} == {n: ord(n) for n in "abcdef"}


def saved(batch):
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [saved, lambda batch: pickle.loads(pickle.dumps(batch)), copy.deepcopy])
def test_it_is_saved_and_copied_without_the_memory_of_neighbours(card, way):
    batch = make_batch()
    for moved in (batch, batch.pin_memory(), batch.pin_memory().to("cuda")):
        found = way(moved)
        assert found.pieces == ()
        assert found.sample_ids == batch.sample_ids
        for one, other in zip(tensors_of(batch), tensors_of(found), strict=True):
            assert torch.equal(one, other)
            assert other.untyped_storage().nbytes() == one.untyped_storage().nbytes()
    torch.save(dict(batch.pin_memory().fields), io.BytesIO())


def test_where_shapes_stand_for_values_no_cells_are_looked_for(card):
    batch = make_batch().pin_memory()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert batch.filled_cells("labels") is None
    assert len(batch.filled_cells("labels")) == 8


def test_who_counts_memory_sees_the_cells_that_a_run_sees(card):
    batch = make_batch().pin_memory()
    with CountStorages():
        assert len(batch.filled_cells("labels")) == 8


def test_the_host_s_memory_is_the_host_s_whatever_the_default_device_is():
    with torch.device("meta"):
        pieces, _ = coalesce_pinned([torch.zeros(5, device="cpu"), torch.ones(5, device="cpu")], pin=False)
    assert pieces[0].memory.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_card_gets_a_micro_batch_by_few_copies():
    pinned = make_batch().pin_memory()
    assert all(t.is_pinned() for t in tensors_of(pinned))
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        there = pinned.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    copies = sum(event.count for event in profile.key_averages() if "Memcpy HtoD" in event.key)
    assert copies == 5  # as above, and the places of the labels
    for one, other in zip(tensors_of(pinned), tensors_of(there), strict=True):
        assert torch.equal(one, other.cpu())
    assert torch.equal(there.filled_cells("labels").cpu(), pinned.filled_cells("labels"))
    there["input_ids"].add_(1)  # of one field alone
    assert torch.equal(there["labels"].cpu(), pinned["labels"])
    assert there.filled_cells("labels") is not None


def test_what_was_on_a_device_comes_back_the_same_and_still_says_what_shares_memory(card):
    batch = make_batch()
    back = batch.pin_memory().to("cuda").to("cpu")
    assert [len(piece.members) for piece in back.pieces] == [5]
    assert_same(replace(back, pieces=()), replace(batch, pieces=()))
