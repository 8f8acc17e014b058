"""Attention over trees of segments: a cell sees its own segment up to itself, and all of its ancestors.

own segments (causal) + one call for each depth of ancestors (whole) -> merged by log-sum-exp -> [cells, H, D]

Each call gives its output and the log of its softmax's denominator, from which the output over all keys follows.
Backward calls the same kernels once more with the merged output and denominator: the weights they recompute are then
those of the whole softmax, so the gradients of the parts add up, and no gradient of a denominator is needed.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from truebatch.attention.cudnn_op import HEAD_STEP
from truebatch.attention.dispatch import AMPERE, HALF, MAX_VARLEN_HEAD
from truebatch.attention.score_rule import Rule, softmax_attention
from truebatch.attention.varlen import varlen_in_torch
from truebatch.attention.varlen_cpu import (
    attend_segments,
    can_attend_on_host,
    segments_backward,
    span_backward,
    span_forward,
)
from truebatch.attention.varlen_static import KernelCall, flash_backward, flash_forward
from truebatch.batch.forest import Forest, ForestLevel, ancestors_of
from truebatch.batch.segments import Segments
from truebatch.errors import AttentionError

ForestKernel = Literal["merged", "per_segment"]
"""merged: a fused kernel for each depth. per_segment: one SDPA call per segment, its ancestors' keys before its own."""


def attend_forest(
    rule: Rule, query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, kernel: ForestKernel | None = None
) -> Tensor:
    """[B, H, T, D]: every cell as if the path from its root down to it were a row of its own."""
    assert segments.forest is not None
    _refuse(rule, segments.forest)
    scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))  # [cells, H, D]
    if (kernel or choose_forest_kernel(query, key, value)) == "merged":
        out = _merged(q, k, v, segments, scale)
    else:
        out = _per_segment(q, k, v, segments, rule)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]).transpose(1, 2)


def choose_forest_kernel(query: Tensor, key: Tensor, value: Tensor) -> ForestKernel:
    """The fused kernels where this device and precision have them."""
    if query.device.type == "cpu":
        return "merged" if can_attend_on_host(query, key, value) else "per_segment"
    is_cuda = query.device.type == "cuda" and varlen_in_torch() and query.dtype in HALF
    fits = is_cuda and max(query.shape[-1], value.shape[-1]) <= MAX_VARLEN_HEAD
    return "merged" if fits and torch.cuda.get_device_capability(query.device) >= AMPERE else "per_segment"


def _refuse(rule: Rule, forest: Forest) -> None:
    window = rule.window is not None and rule.window < forest.longest_path
    named = {
        "attention in both directions: a prompt would see its answers": not rule.causal,
        f"a window of {rule.window} cells, shorter than a path of {forest.longest_path}": window,
        "dropout of attention weights": rule.dropout > 0,
        "a bias added to the scores": rule.bias is not None,
        "a softcap": rule.softcap is not None,
        "attention sinks": rule.sinks is not None,
        "a compiled model": torch.compiler.is_compiling(),
    }
    found = [name for name, holds in named.items() if holds]
    if found:
        raise AttentionError(
            "a shared beginning cannot be attended to in this way",
            seen="; ".join(found),
            do="give every sample a copy of its beginning (share='nothing')",
        )


def _per_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    assert segments.forest is not None
    pieces = [torch.split(part, list(segments.lengths)) for part in (query, key, value)]
    outs = []
    for at, length in enumerate(segments.lengths):
        path = ancestors_of(segments.forest.parents, at)
        q = pieces[0][at]
        k, v = (torch.cat([part[one] for one in path]) for part in pieces[1:])
        allowed = torch.ones(length, len(k), dtype=torch.bool, device=q.device).tril(len(k) - length)
        q, k, v = (part[None].transpose(1, 2) for part in (q, k, v))
        found = softmax_attention(q, k, v, allowed, rule, causal=False)
        outs.append(found[0].transpose(0, 1))
    return torch.cat(outs)


def _merged(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    if not query.is_cuda:
        found: Tensor = _MergedAttention.apply(query, key, value, _HostKernels(segments, scale))  # type: ignore[no-untyped-call]
        return found
    width, wide = value.shape[-1], -(-max(query.shape[-1], value.shape[-1]) // HEAD_STEP) * HEAD_STEP
    parts = [pad(part, (0, wide - part.shape[-1])).contiguous() for part in (query, key, value)]
    found = _MergedAttention.apply(*parts, _FlashKernels(segments, scale))  # type: ignore[no-untyped-call]
    return found[..., :width]


class _Kernels(Protocol):
    """Fused attention of one table: denominators as [cells, H] logarithms."""

    levels: tuple[ForestLevel, ...]

    def own(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...

    def own_backward(self, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def above(self, level: ForestLevel, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...

    def add_above_backward(self, level: ForestLevel, grads: tuple[Tensor, ...], *parts: Tensor) -> None: ...


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernels: _Kernels) -> Tensor:
        out, lse = kernels.own(query, key, value)
        for level in kernels.levels:
            merge_below(level, out, lse, *kernels.above(level, query, key, value))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts, kernels = (grad.contiguous(), *ctx.saved_tensors), ctx.kernels
        grads = kernels.own_backward(*parts)
        for level in kernels.levels:
            kernels.add_above_backward(level, grads, *parts)
        return (*grads, None)


def merge_below(level: ForestLevel, out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add to `out` and `lse`, in place, what the cells below a level found among its keys: [nq, H, D] and [nq, H]."""
    cells = level.query_cells
    own, own_lse = out[cells], lse[cells]
    total = torch.logaddexp(own_lse, more_lse)
    exact = own_lse.dtype
    weights = (torch.exp(own_lse - total)[..., None], torch.exp(more_lse - total)[..., None])
    merged = own.to(exact) * weights[0] + more.to(exact) * weights[1]
    out.index_copy_(0, cells, merged.to(out.dtype))
    lse.index_copy_(0, cells, total)


class _HostKernels:
    """torch's kernel for CPUs, called for each span."""

    def __init__(self, segments: Segments, scale: float) -> None:
        assert segments.forest is not None
        self.levels, self.starts, self.scale = segments.forest.levels, segments.starts, scale

    def own(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend_segments(query, key, value, self.starts, causal=True, scale=self.scale)

    def own_backward(self, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad, query, key, value, out, lse = parts
        return segments_backward(grad, query, key, value, out, lse, self.starts, causal=True, scale=self.scale)

    def above(self, level: ForestLevel, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found = [
            span_forward(query[slice(*some)], key[slice(*seen)], value[slice(*seen)], scale=self.scale)
            for some, seen in zip(level.queries, level.keys, strict=True)
        ]
        outs, sums = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(sums)

    def add_above_backward(self, level: ForestLevel, grads: tuple[Tensor, ...], *parts: Tensor) -> None:
        grad, query, key, value, out, lse = parts
        for some, seen in zip(level.queries, level.keys, strict=True):
            below, above = slice(*some), slice(*seen)
            found = span_backward(
                grad[below], query[below], key[above], value[above], out[below], lse[below], scale=self.scale
            )
            for whole, cells, one in zip(grads, (below, above, above), found, strict=True):
                whole[cells] += one


class _FlashKernels:
    """torch's variable-length kernel on a GPU, called for each depth."""

    def __init__(self, segments: Segments, scale: float) -> None:
        assert segments.forest is not None
        self.levels, self.scale = segments.forest.levels, scale
        # A bound of 1 would select the kernel's decoding path, with other layouts.
        self.call = KernelCall(segments.starts, max(segments.max_length, 2), True, -1, 0, scale)

    def own(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_forward(query, key, value, self.call)
        return out, lse.t().contiguous()

    def own_backward(self, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad, query, key, value, out, lse = parts
        return flash_backward(grad, query, key, value, out, lse.t().contiguous(), self.call)

    def above(self, level: ForestLevel, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = level.longest
        found = torch.ops.aten._flash_attention_forward(
            query[level.query_cells], key[level.key_cells], value[level.key_cells], level.query_starts,
            level.key_starts, max(queries, 2), max(keys, 2), 0.0, False, False, scale=self.scale,
            window_size_left=-1, window_size_right=-1,
        )  # fmt: skip
        return found[0], found[1].t()

    def add_above_backward(self, level: ForestLevel, grads: tuple[Tensor, ...], *parts: Tensor) -> None:
        grad, query, key, value, out, lse = parts
        queries, keys = level.longest
        below, above = level.query_cells, level.key_cells
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        found = torch.ops.aten._flash_attention_backward(
            grad[below], query[below], key[above], value[above], out[below], lse[below].t().contiguous(),
            level.query_starts, level.key_starts, max(queries, 2), max(keys, 2), 0.0, False, no_dropout,
            torch.empty(0, device=query.device), scale=self.scale, window_size_left=-1, window_size_right=-1,
        )  # fmt: skip
        for whole, cells, one in zip(grads, (below, above, above), found, strict=True):
            whole.index_add_(0, cells, one)
