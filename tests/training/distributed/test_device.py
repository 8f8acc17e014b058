"""Where a run happens: on a machine with GPUs, told without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from truebatch.training.config import TrainConfig
from truebatch.training.distributed import device as place
from truebatch.training.distributed.device import find_device, with_index
from truebatch.training.memory import measure
from truebatch.training.memory.measure import free_bytes_of


@pytest.fixture
def gpus(monkeypatch):
    """torch as on a machine with two GPUs, the second of which is the current one; what asks for a number is torch's own."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda number: {0: 0.25, 1: 0.5}[number], raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    counts = {"mem_get_info": (700, 1000), "memory_reserved": 100, "memory_allocated": 40}
    for name, value in counts.items():
        monkeypatch.setattr(measure.torch.cuda, name, lambda device, value=value: value)


def test_the_device_of_a_run_on_a_gpu_has_its_number(gpus, monkeypatch):
    monkeypatch.setattr(place, "PartialState", lambda: SimpleNamespace(device=torch.device("cuda")))
    assert find_device(TrainConfig()).device == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["cpu", "cuda:0", "meta", "mps"])
def test_a_device_that_needs_no_number_or_has_one_stays_as_it_is(name, gpus):
    assert with_index(torch.device(name)) == torch.device(name)


@pytest.mark.parametrize(("name", "free"), [("cuda", 460), ("cuda:1", 460), ("cuda:0", 210)])
def test_the_free_memory_of_a_gpu_is_known_with_and_without_its_number(name, free, gpus):
    assert free_bytes_of(torch.device(name)) == free
