"""Variable-length attention with a segment table of fixed shape, for compiled models.

table on the device + bounds on the host -> one kernel call for the segments that exist -> [cells, H, D]

The number of segments and the longest length are in a host tensor: a compiled model guards its shape but not its
values, so neither causes a recompile. The operator cuts the table to the segments that exist, because the kernel starts
a block of work for every piece of the longest segment in every segment, empty or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from truebatch.batch.custom_op import define_operator
from truebatch.batch.segments import Bounds


def read_bounds(bounds: Tensor) -> Bounds:
    """The values of `Segments.bounds_tensor`."""
    return Bounds(*bounds.tolist())


def attend_fixed_table(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Tensor, window: tuple[int, int], scale: float
) -> Tensor:
    """[cells, H, D] attention inside each segment; `window` is how far a query sees to the left and right, -1 all."""
    return _attend(query, key, value, starts, bounds, *window, scale)


_kept: list[tuple[Tensor, Tensor]] | None = None


@contextmanager
def kept_keys() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Context that collects the keys and values [cells, H, D] of every call, in order: compiled layers fill no
    cache."""
    global _kept  # noqa: PLW0603 (compiled code calls the operators and can pass nothing else)
    _kept = []
    try:
        yield _kept
    finally:
        _kept = None


@contextmanager
def no_kept_keys() -> Iterator[None]:
    """Context in which calls are not recorded, for another part of the model such as the vision tower."""
    global _kept  # noqa: PLW0603
    outer, _kept = _kept, None
    try:
        yield
    finally:
        _kept = outer


def keys_are_kept() -> bool:
    """True while `kept_keys` is open."""
    return _kept is not None


def keep_keys(key: Tensor, value: Tensor) -> None:
    """Record a copy of a call's keys and values: compiled code reuses their memory."""
    if _kept is not None:
        _kept.append((key.clone(), value.clone()))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Tensor, rule: Sequence[float]
) -> tuple[Tensor, Tensor]:
    keep_keys(key, value)
    return flash_forward(query, key, value, _call(starts, bounds, rule))


def _forward_shapes(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    cells, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, cells), dtype=torch.float32)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    bounds: Tensor,
    rule: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    one, two, three = flash_backward(grad, query, key, value, out, lse, _call(starts, bounds, rule))
    return one.contiguous(), two.contiguous(), three.contiguous()


def _gradient_shapes(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def define_attention(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], *, shapes: Callable[..., Any]
) -> Callable[..., Tensor]:
    """Register attention (query, key, value, starts, bounds, *rule) -> output as two operators, forward and backward;
    table, bounds and rule get no gradient.

    An autograd function connects them, which a compiler can trace: a gradient registered with the operator would make
    torch enter Python once more in every call, compiled or not.
    """
    parts, table = "Tensor query, Tensor key, Tensor value", "Tensor starts, Tensor bounds, float[] rule"
    attend = define_operator(f"{name}({parts}, {table}) -> (Tensor, Tensor)", forward, shapes=shapes)
    differentiate = define_operator(
        f"{name}_backward(Tensor grad, {parts}, Tensor out, Tensor statistics, {table}) -> (Tensor, Tensor, Tensor)",
        backward, shapes=_gradient_shapes,
    )  # fmt: skip

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            query, key, value, starts, bounds, *rule = inputs
            out, statistics = attend(query, key, value, starts, bounds, rule)
            ctx.save_for_backward(query, key, value, out, statistics, starts, bounds)
            ctx.rule = rule
            found: Tensor = out
            return found

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            grads = differentiate(grad.contiguous(), *ctx.saved_tensors, ctx.rule)
            return (*grads, None, None, *(None for _ in ctx.rule))

    return Attention.apply


_attend = define_attention("attend_fixed_table", _forward, _backward, shapes=_forward_shapes)


class KernelCall(NamedTuple):
    """What one kernel call needs besides its tensors."""

    starts: Tensor
    """First cells of the segments, and the end."""
    longest: int
    causal: bool
    left: int
    """Cells a query sees before its own; -1 all."""
    right: int
    scale: float


def _call(starts: Tensor, bounds: Tensor, rule: Sequence[float]) -> KernelCall:
    used, longest, *_ = read_bounds(bounds)
    left, right, scale = int(rule[0]), int(rule[1]), rule[2]
    # A bound of 1 would select the kernel's decoding path, with other layouts.
    return KernelCall(starts[: used + 1], max(longest, 2), (left, right) == (-1, 0), left, right, scale)


def flash_forward(query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> tuple[Tensor, Tensor]:
    """One call of the kernel: output [cells, H, D] and the log of the softmax's denominator [H, cells]."""
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, call.starts, call.starts, call.longest, call.longest, 0.0, call.causal, False,
        scale=call.scale, window_size_left=call.left, window_size_right=call.right,
    )  # fmt: skip
    return found[0], found[1]


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: KernelCall
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one call."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, call.starts, call.starts, call.longest, call.longest, 0.0, call.causal,
        no_dropout, torch.empty(0, device=query.device),
        scale=call.scale, window_size_left=call.left, window_size_right=call.right,
    )  # fmt: skip
    return found
