"""The global random generators of Python, NumPy and torch: seeded when a run begins, saved and restored with it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def random_state() -> State:
    """The state of every global generator: Python, NumPy, torch on the CPU and on each CUDA device."""
    cuda = torch.cuda.get_rng_state_all() if _uses_cuda() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
    }


def seed_random(seed: int, *, rank: int = 0) -> None:
    """Seed every global generator: Python, NumPy, torch on the CPU and, once they are used, on CUDA devices.

    Ranks draw differently; rank 0 draws as after `torch.manual_seed(seed)`.
    """
    mixed = seed if rank == 0 else int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0])
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed % 2**63)


def restore_random(state: State) -> tuple[str, ...]:
    """Give the global generators their states back, and say which could not get theirs on this machine."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved, here = len(state["cuda"]), torch.cuda.device_count()
    for device, values in enumerate(state["cuda"][:here]):
        torch.cuda.set_rng_state(values, device)
    if saved == here or (saved == 0 and not _uses_cuda()):
        return ()
    return (f"random generators of {saved} CUDA devices were saved, {here} devices are here",)


def _uses_cuda() -> bool:
    # Asking a device for its state would start CUDA in a process that does not use it.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
