"""Attention of packed rows through cuDNN's planned kernels, as an operator that compiled models may call.

[cells, H, D] + table on the device + bounds on the host -> plan -> one call, forward or backward

The number of samples and the longest are values of a tensor on the host, as in `fixedtable`: neither compiles anything
again. Where cuDNN has no kernel for a shape, torch's own takes the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truebatch.tensors.cudnnplans import (
    Shape,
    attend_planned,
    backward_plan,
    differentiate_planned,
    fill_slots,
    forward_plan,
    shape_of,
)
from truebatch.tensors.fixedtable import (
    KernelCall,
    differentiate_by,
    flash_backward,
    flash_forward,
    gradient_shapes,
    keep_for_backward,
    keep_keys,
)


def attend_by_plan(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Tensor, *, causal: bool, scale: float
) -> Tensor:
    """[cells, H, D] attention inside each segment; `bounds` of `table_bounds`."""
    parts = (part.contiguous() for part in (query, key, value))
    out: Tensor = torch.ops.truebatch.attend_by_plan(*parts, starts, bounds, [float(causal), scale])[0]
    return out


@torch.library.custom_op("truebatch::attend_by_plan", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Tensor, rule: Sequence[float]
) -> tuple[Tensor, Tensor]:
    keep_keys(key, value)
    shape, call = _served(query, key, starts, bounds, rule)
    plan = forward_plan(shape)
    if plan is not None:
        return attend_planned(plan, query, key, value, fill_slots(call.starts, len(call.starts) - 1))
    out, lse = flash_forward(query, key, value, call)
    return out, lse.t().contiguous()


@_forward.register_fake
def _forward_shapes(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("truebatch::attend_by_plan_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    stats: Tensor,
    starts: Tensor,
    bounds: Tensor,
    rule: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    shape, call = _served(query, key, starts, bounds, rule)
    plan = backward_plan(shape, cells=len(query))
    if plan is not None:
        slots = fill_slots(call.starts, len(call.starts) - 1)
        return differentiate_planned(plan, grad, query, key, value, out, stats, slots)
    one, two, three = flash_backward(grad, query, key, value, out, stats.t().contiguous(), call)
    return one.contiguous(), two.contiguous(), three.contiguous()


_backward.register_fake(gradient_shapes)
_forward.register_autograd(differentiate_by(_backward), setup_context=keep_for_backward)


def _served(
    query: Tensor, key: Tensor, starts: Tensor, bounds: Tensor, rule: Sequence[float]
) -> tuple[Shape, KernelCall]:
    """The shape of the plans for this call, and the same call for torch's own kernel."""
    used, longest = bounds.tolist()
    causal, scale = bool(rule[0]), rule[1]
    shape = shape_of(query, key, used=used, longest=longest, causal=causal, scale=scale)
    return shape, KernelCall(starts[: used + 1], max(longest, 2), causal, -1, 0 if causal else -1, scale)
