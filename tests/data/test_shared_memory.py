"""Handing objects over: what arrives is what was sent, and nothing is left behind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.batch.fields import DTYPES
from truebatch.data.shared_memory import receive_object, send_object


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def sent(value):
    one, other = socket.socketpair()
    with one, other:
        send_object(one, value)
        return receive_object(other, wait=True)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES[1:]), st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=5)
)
def test_tensors_of_every_dtype_shape_and_stride_arrive_as_they_were(kinds):
    tensors = []
    for dtype, shape, is_turned in kinds:
        tensor = torch.arange(int(np.prod(shape, dtype=int))).view(shape).to(getattr(torch, dtype))
        tensors.append(tensor.transpose(0, -1) if is_turned and shape else tensor)
    came = sent({"tensors": tensors, "rest": (1, "two", np.arange(3))})
    for one, other in zip(came["tensors"], tensors, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)
        one.zero_()  # what arrives may be written to
    assert came["rest"][:2] == (1, "two")
    assert came["rest"][2].tolist() == [0, 1, 2]


def test_a_tensor_keeps_its_memory_after_the_message_and_the_sender_are_gone(ends):
    pid = os.fork()
    if not pid:
        send_object(ends[0], [torch.arange(100_000), torch.ones(3)])
        os._exit(0)
    os.waitpid(pid, 0)
    first = receive_object(ends[1], wait=True)[0]
    assert torch.equal(first, torch.arange(100_000))


def test_messages_keep_their_order_and_do_not_wait_for_the_reader(ends):
    for number in range(50):
        send_object(ends[0], (number, torch.full((50_000,), number)))
    for number in range(50):
        got, tensor = receive_object(ends[1], wait=False)
        assert got == number
        assert int(tensor[-1]) == number
    with pytest.raises(BlockingIOError):
        receive_object(ends[1], wait=False)
    ends[0].close()
    with pytest.raises(EOFError):
        receive_object(ends[1], wait=False)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_descriptor_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        sent([torch.arange(1000)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_memfd_a_nameless_file_does_the_same(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert torch.equal(sent(torch.arange(1000)), torch.arange(1000))


def test_a_full_memory_is_an_error_and_not_a_bus_error(monkeypatch, ends):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        send_object(ends[0], torch.ones(3))
    assert len(os.listdir("/proc/self/fd")) == before
