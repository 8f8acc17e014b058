"""Out of memory in an optimiser: no smaller micro-batch helps. Memory is freed and the same update tried once more.

Only where nothing was changed yet; half an update is never repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truebatch.errors import MemoryLimitError
from truebatch.testing.failpoints import failpoint
from truebatch.training.memory.oom import first_line, free_memory, is_out_of_memory

Versions = list[tuple[Tensor, int]]
TRIES = 2
COUNTED = ("torch", "transformers", "accelerate", "truebatch")
"""Packages whose optimisers write parameters so that torch counts it. What is written through `.data` goes uncounted: of an
optimiser of another package there is no telling whether it has begun."""


def optimizer_step_with_oom_retry(
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    *,
    device: torch.device,
    is_first: bool = True,
) -> None:
    """Step this optimiser; if memory runs out before anything changed, free some and step it again.

    Raises `MemoryLimitError` when that does not help, or when the update was half done. `is_first`: no other optimiser
    has been stepped before it in this step.
    """
    before, versions = _state_of(optimiser), _versions(optimiser)
    for _ in range(TRIES):
        try:
            failpoint("step.optimiser")
            if scaler is None:
                optimiser.step()
            else:
                scaler.step(optimiser)
            return
        except Exception as error:  # memory runs out in errors of many classes
            if not is_out_of_memory(error):
                raise
            said = first_line(error)
        if any(tensor._version != version for tensor, version in versions):
            raise _does_not_fit(optimiser, said, "the update was half done, so the model in memory is not usable")
        if type(optimiser).__module__.split(".")[0] not in COUNTED:
            raise _does_not_fit(optimiser, said, "the update may be half done, so the model in memory is not usable")
        _put_back(optimiser, before)
        free_memory(device, said=said)
    if is_first:
        raise _does_not_fit(optimiser, said, "tried twice, the second time with memory freed")
    raise _does_not_fit(
        optimiser, said, "another optimiser was run before it, so the model in memory may be half updated"
    )


def _state_of(optimiser: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {p: dict(values) for p, values in optimiser.state.items()}


def _versions(optimiser: torch.optim.Optimizer) -> Versions:
    """Every tensor an update may write, and torch's own count of the writes to it."""
    tensors: list[Tensor] = [p for part in optimiser.param_groups for p in part["params"]]
    tensors += [v for values in optimiser.state.values() for v in values.values() if isinstance(v, Tensor)]
    return [(tensor, tensor._version) for tensor in tensors]


def _put_back(optimiser: torch.optim.Optimizer, before: dict[Tensor, dict[str, Any]]) -> None:
    """State that was being made for the first time goes: half of it would pass for whole."""
    optimiser.state.clear()
    optimiser.state.update(before)


def _does_not_fit(optimiser: torch.optim.Optimizer, said: str, how: str) -> MemoryLimitError:
    numbers = sum(p.numel() for part in optimiser.param_groups for p in part["params"])
    return MemoryLimitError(
        f"the update of {type(optimiser).__name__} does not fit into memory, however the step is cut",
        seen=f"{numbers:,} parameters; {said}; {how}",
        do="train fewer parameters, use an optimiser with less state (SGD, Adafactor, 8-bit Adam), or shard the model",
    )
