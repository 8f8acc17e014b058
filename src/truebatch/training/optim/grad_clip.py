"""The norm of a group's gradient, and clipping to the largest norm allowed; both on the device, also where sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from truebatch.training.optim.param_groups import Group

CLEARLY_BELOW = 1 - 1e-4
"""A share of the largest norm: a gradient whose norm is below it would be multiplied by exactly 1, which can be left out."""


def grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of the gradient over all parameters of a group, as one number on the device."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm: Tensor = nn.utils.get_total_norm(grads)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_group(group: Group, norm: float, device: torch.device) -> None:
    """Scale the gradient of a group, whose norm is known, down to its largest allowed norm."""
    largest = group.max_grad_norm
    if largest is None or norm + 1e-6 < largest * CLEARLY_BELOW:
        return
    # Filled on the device, which avoids a host-device sync.
    on_device = torch.full((), norm, dtype=torch.float32, device=device)
    nn.utils.clip_grads_with_norm_(group.parameters, largest, on_device)
