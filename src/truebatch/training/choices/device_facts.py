"""What the choice of settings asks of a device: one value, so that tests can describe a device that is not there."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from truebatch.training.distributed.collectives import num_ranks

COMPILES_FROM = (7, 0)
"""The least compute capability of GPUs that Triton writes kernels for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A device, as far as settings depend on it."""

    kind: str
    """cuda or cpu."""
    name: str
    has_bf16: bool
    """It computes in bfloat16 itself, without emulating it."""
    can_compile: bool
    """torch.compile has a compiler for it here, and compiled layers are faster on it."""
    cores: int
    """Of the CPU, for each process of the run."""

    @property
    def is_gpu(self) -> bool:
        """True for a GPU."""
        return self.kind != "cpu"


def device_facts(device: torch.device) -> DeviceFacts:
    """What this device can do."""
    cores = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    cores = max(1, cores // num_ranks())
    if device.type != "cuda":
        # A CPU may have bfloat16; measured here, training in it was slower than in float32, and compiling gained nothing.
        return DeviceFacts(kind=device.type, name=device.type, has_bf16=False, can_compile=False, cores=cores)
    has_triton = importlib.util.find_spec("triton") is not None
    return DeviceFacts(
        kind="cuda",
        name=torch.cuda.get_device_name(device),
        has_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        can_compile=has_triton and torch.cuda.get_device_capability(device) >= COMPILES_FROM,
        cores=cores,
    )
