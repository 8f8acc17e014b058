"""Variable-length attention whose cost follows the samples, with a table of fixed shape.

table on the device + groups on the host -> one kernel call a group of segments of similar length -> [cells, H, D]

The kernel starts a block of work for every piece of the longest segment in every segment, most of them for nothing
where lengths differ much. Segments that lie together and are of similar length get a call of their own, with a bound of
their own. The groups are a tensor on the host: a compiled model guards its shape and never its values, so that neither
the number of samples in a row nor the longest of them compiles anything again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from truebatch.tensors.segments import Segments

MOST_GROUPS = 4
"""Calls of the kernel at most."""
STEEPNESS = 4
"""A segment this many times shorter than the longest of its group begins a new group."""


def kernel_groups(segments: Segments, *, steepness: int = STEEPNESS) -> Tensor:
    """[MOST_GROUPS, 5] int32 on the host: first and last segment, first and last cell, the longest; zeros if unused.

    Groups are consecutive segments, so only samples in order of falling length make more than one.
    """
    lengths = [length for length in segments.lengths if length]
    sizes = segments.sample_lengths
    is_falling = all(one >= other for one, other in pairwise(sizes))
    cuts = _cuts(lengths, MOST_GROUPS if is_falling else 1, steepness)
    ends = np.cumsum([0, *lengths])
    table = np.zeros((MOST_GROUPS, 5), dtype=np.int32)
    for at, (first, last) in enumerate(pairwise(cuts)):
        table[at] = (first, last, ends[first], ends[last], max(lengths[first:last]))
    return torch.from_numpy(table)


def _cuts(lengths: list[int], most: int, steepness: int) -> list[int]:
    """Where groups begin, and the number of segments."""
    cuts, longest = [0], 0
    for at, length in enumerate(lengths):
        if at and length * steepness < longest and len(cuts) < most:
            cuts.append(at)
            longest = length
        longest = max(longest, length)
    return [*cuts, len(lengths)] if lengths else [0]


def attend_groups(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, groups: Tensor, window: tuple[int, int], scale: float
) -> Tensor:
    """[cells, H, D] attention inside each segment; `window` is how far a query sees to the left and right, -1 all."""
    causal = window == (-1, 0)
    out: Tensor = torch.ops.truebatch.attend_groups(query, key, value, starts, groups, causal, *window, scale)[0]
    return out


@torch.library.custom_op("truebatch::attend_groups", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    groups: Tensor,
    causal: bool,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _forward_shapes(query, key, value, starts, groups, causal, left, right, scale)
    for first, last, begin, end, longest in _used(groups):
        call = KernelCall(starts[first : last + 1] - begin, longest, causal, left, right, scale)
        found, norm = flash_forward(query[begin:end], key[begin:end], value[begin:end], call)
        if end - begin == query.shape[0]:
            return found, norm
        out[begin:end] = found
        lse[:, begin:end] = norm
    return out, lse


@_forward.register_fake
def _forward_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    groups: Tensor,
    causal: bool,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    cells, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, cells), dtype=torch.float32)


@torch.library.custom_op("truebatch::attend_groups_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    groups: Tensor,
    causal: bool,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(part.new_empty(part.shape) for part in (query, key, value))
    for first, last, begin, end, longest in _used(groups):
        call = KernelCall(starts[first : last + 1] - begin, longest, causal, left, right, scale)
        q, k, v = query[begin:end], key[begin:end], value[begin:end]
        found = flash_backward(grad[begin:end], q, k, v, out[begin:end], lse[:, begin:end].contiguous(), call)
        if end - begin == query.shape[0]:
            return found
        for whole, part in zip(grads, found, strict=True):
            whole[begin:end] = part
    return grads[0], grads[1], grads[2]


@_backward.register_fake
def _backward_shapes(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    groups: Tensor,
    causal: bool,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, groups, *ctx.rule = inputs
    ctx.save_for_backward(query, key, value, *output, starts, groups)


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    found = torch.ops.truebatch.attend_groups_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rule)
    return (*found, None, None, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _used(groups: Tensor) -> list[list[int]]:
    # A bound of 1 would take the kernel's way for generation, with other layouts.
    return [[*row[:4], max(row[4], 2)] for row in groups.tolist() if row[3] > row[2]]


class KernelCall(NamedTuple):
    """What one call of the kernel needs beside its tensors."""

    starts: Tensor
    """First cells of the segments of this call, counted from its own first cell."""
    longest: int
    causal: bool
    left: int
    """Cells a query sees before its own; -1 all."""
    right: int
    scale: float


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
