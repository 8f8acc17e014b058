"""Bytes at the peak, against cases worked out by hand."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch
from torch import nn

from truebatch.training.memory.measure import (
    ADDRESSES_OF_THREADS,
    CountStorages,
    added_bytes,
    free_bytes_of,
    held_bytes,
    usable_bytes,
)

CPU = torch.device("cpu")
FLOAT = 4


def test_what_is_alive_together_is_added_and_what_was_freed_is_not():
    def together():
        first = torch.zeros(100)
        second = torch.zeros(50)
        return first, second

    def in_turn():
        first = torch.zeros(100)
        del first
        return torch.zeros(50)

    assert added_bytes(together, device=CPU) == 150 * FLOAT
    assert added_bytes(in_turn, device=CPU) == 100 * FLOAT


def test_a_view_costs_nothing_and_keeps_its_storage_alive():
    def work():
        whole = torch.zeros(100)
        part = whole.view(10, 10)[3:5]
        del whole
        other = torch.zeros(30)
        return part, other

    assert added_bytes(work, device=CPU) == 130 * FLOAT


def test_an_operation_in_place_costs_nothing_also_on_what_was_there_before():
    there = torch.zeros(1000)
    assert added_bytes(lambda: there.add_(1).mul_(2), device=CPU) == 0
    assert added_bytes(lambda: there[:10].zero_(), device=CPU) == 0
    assert added_bytes(lambda: torch.zeros(10).add_(1).sub_(3), device=CPU) == 10 * FLOAT


def test_a_view_of_what_was_there_before_costs_nothing():
    there = torch.zeros(1000)
    assert added_bytes(lambda: there.view(10, 100).t(), device=CPU) == 0


def test_forward_and_backward_of_a_linear_layer_is_what_it_must_be():
    rows, wide, narrow = 8, 32, 4
    layer = nn.Linear(wide, narrow, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    x = torch.zeros(rows, wide)

    def work():
        y = layer(x)  # rows x narrow, alive until the end
        y.backward(gradient)

    gradient = torch.ones(rows, narrow)
    weight_gradient = wide * narrow  # made new, then added to the one that is there
    assert added_bytes(work, device=CPU) == (rows * narrow + weight_gradient) * FLOAT


@pytest.mark.parametrize("depth", [1, 4])
def test_what_is_saved_for_backward_is_counted(depth):
    x = torch.zeros(100, requires_grad=True)

    def work():
        y = x
        for _ in range(depth):
            y = y.exp()  # saves its result
        return y

    assert added_bytes(work, device=CPU) == depth * 100 * FLOAT
    with torch.no_grad():
        # Without a graph only the last one and the one before it are ever alive.
        assert added_bytes(work, device=CPU) == min(depth, 2) * 100 * FLOAT


def test_the_number_is_the_same_each_time():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
    x = torch.randn(20, 16)

    def work():
        model.zero_grad()
        model(x).square().sum().backward()

    assert len({added_bytes(work, device=CPU) for _ in range(5)}) == 1


def test_storages_that_outlive_the_count_do_not_disturb_the_next_one():
    with CountStorages() as count:
        kept = torch.zeros(10)
    assert (count.live_bytes, count.peak_bytes) == (40, 40)
    del kept
    assert count.live_bytes == 40
    assert added_bytes(lambda: torch.zeros(5), device=CPU) == 20


def test_tied_parameters_are_held_once():
    layer = nn.Linear(4, 4, bias=False)
    assert held_bytes([layer.weight, layer.weight.t(), torch.zeros(2)]) == 64 + 8


def test_a_machine_has_some_memory_left():
    assert free_bytes_of(CPU) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of Linux")
def test_what_the_system_lets_a_process_have_is_all_there_is(monkeypatch):
    process = psutil.Process
    monkeypatch.setattr(
        process,
        "rlimit",
        lambda self, _kind: (self.memory_info().vms + ADDRESSES_OF_THREADS + 10 * 2**20, psutil.RLIM_INFINITY),
    )
    assert 5 * 2**20 < free_bytes_of(CPU) <= 10 * 2**20
    monkeypatch.setattr(process, "rlimit", lambda _self, _kind: (1, 1))
    assert free_bytes_of(CPU) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_allocator_and_the_count_agree_on_plain_tensors():
    device = torch.device("cuda")

    def work():
        first = torch.zeros(1 << 20, device=device)
        return first + 1

    assert added_bytes(work, device=device) == 2 * FLOAT << 20


def test_a_card_keeps_room_for_the_gaps_between_blocks():
    """In a share of 13 GiB a twentieth was once not enough: memory ran out with 0.4 GiB of gaps."""
    card = torch.device("cuda")
    assert usable_bytes(100 << 30, card) == 95 << 30
    assert usable_bytes(13 << 30, card) == 12 << 30
    assert usable_bytes(1 << 30, card) == (1 << 30) - int(0.1 * 2**30)
    assert usable_bytes(1 << 30, torch.device("cpu")) == 1 << 30
