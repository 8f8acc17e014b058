"""The norm of a group's gradient, and clipping to the largest norm allowed; both on the device, also where sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from truebatch.training.optim.param_groups import Group


def grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of the gradient over all parameters of a group, as one number on the device."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm: Tensor = nn.utils.get_total_norm(grads)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_group(group: Group, norm: Tensor) -> None:
    """Scale the gradient of a group down to its largest allowed norm."""
    if group.max_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(group.parameters, group.max_grad_norm, norm)
