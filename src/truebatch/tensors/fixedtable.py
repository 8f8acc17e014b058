"""Variable-length attention with a segment table of fixed shape, for compiled models.

table on the device + bounds on the host -> one call of the kernel, for the segments that are there -> [cells, H, D]

How many segments a row has and how long the longest is stand in a tensor on the host: a compiled model guards its shape
and never its values, so that neither compiles anything again. The operator cuts the table to the segments that are
there, because the kernel starts a block of work for every piece of the longest segment in every segment, empty or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from truebatch.tensors.segments import Segments

SHORT = 256
"""Samples of up to so many cells are short: kernels for long ones give each of them tiles that it does not fill."""


class Bounds(NamedTuple):
    """What the host knows of a table."""

    used: int
    """Segments that are not empty; they come first."""
    longest: int
    long: int
    """Of them, those up to the last sample that is not short. What follows is short samples and padding."""
    long_cells: int


def table_bounds(segments: Segments) -> Tensor:
    """[4] int32 on the host: the `Bounds` of a table, for compiled models."""
    return torch.tensor(bounds_of(segments), dtype=torch.int32, device="cpu")


def bounds_of(segments: Segments) -> Bounds:
    """What the host knows of a table."""
    return _bounds(segments.lengths, segments.is_sample)


@functools.lru_cache(maxsize=64)  # asked by every layer
def _bounds(lengths: tuple[int, ...], is_sample: tuple[bool, ...]) -> Bounds:
    used = long = long_cells = cells = 0
    for length, is_real in zip(lengths, is_sample, strict=True):
        used, cells = used + (length > 0), cells + length
        if is_real and length > SHORT:
            long, long_cells = used, cells
    return Bounds(used, max(lengths, default=0), long, long_cells)


def read_bounds(bounds: Tensor) -> Bounds:
    """The numbers of `table_bounds`."""
    return Bounds(*bounds.tolist())


def attend_fixed_table(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Tensor, window: tuple[int, int], scale: float
) -> Tensor:
    """[cells, H, D] attention inside each segment; `window` is how far a query sees to the left and right, -1 all."""
    out: Tensor = torch.ops.truebatch.attend_fixed_table(query, key, value, starts, bounds, [*window, scale])[0]
    return out


_kept: list[tuple[Tensor, Tensor]] | None = None


@contextmanager
def kept_keys() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While open, the keys and values [cells, H, D] of every call, in order: compiled layers fill no cache."""
    global _kept  # noqa: PLW0603 (operators are called by compiled code, which hands nothing else through)
    _kept = []
    try:
        yield _kept
    finally:
        _kept = None


@contextmanager
def no_kept_keys() -> Iterator[None]:
    """While open, calls are not noted: those of another part of the model, such as the one that sees images."""
    global _kept  # noqa: PLW0603
    outer, _kept = _kept, None
    try:
        yield
    finally:
        _kept = outer


def keep_keys(key: Tensor, value: Tensor) -> None:
    """Note a call's keys and values, copied: compiled code uses their memory again."""
    if _kept is not None:
        _kept.append((key.clone(), value.clone()))


@torch.library.custom_op("truebatch::attend_fixed_table", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Tensor, rule: Sequence[float]
) -> tuple[Tensor, Tensor]:
    keep_keys(key, value)
    return flash_forward(query, key, value, _call(starts, bounds, rule))


@_forward.register_fake
def _forward_shapes(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    cells, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, cells), dtype=torch.float32)


@torch.library.custom_op("truebatch::attend_fixed_table_backward", mutates_args=())
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


@_backward.register_fake
def gradient_shapes(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, as a compiler sees them."""
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the backward half of an operator needs: its tensors and results, and its rule."""
    *tensors, starts, bounds, ctx.rule = inputs
    ctx.save_for_backward(*tensors, *output, starts, bounds)


def differentiate_by(backward: Callable[..., Any]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradient of an operator through its backward half; table, bounds and rule have none."""

    def differentiate(ctx: Any, grad: Tensor, _grad_of_statistics: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*backward(grad.contiguous(), *ctx.saved_tensors, ctx.rule), None, None, None)

    return differentiate


_forward.register_autograd(differentiate_by(_backward), setup_context=keep_for_backward)


class KernelCall(NamedTuple):
    """What one call of the kernel needs beside its tensors."""

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
    # A bound of 1 would take the kernel's way for generation, with other layouts.
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
