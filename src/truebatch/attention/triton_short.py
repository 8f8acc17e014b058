"""Attention of many short samples on a GPU: neighbours share tiles, where other kernels give each sample its own.

[cells, H, D] + start and end of each cell's sample -> output and statistics, or gradients

A tile of queries reads the cells from the start of its first sample to the end of its last. Kernels made for
long samples begin a tile with every sample instead, and what they compute before and behind the tiles is as long as the
longest sample for all of them. Written in Triton, which torch's CUDA builds include; needs no other package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from truebatch.attention.cudnn_graph import Parts

TILE = 64
WARPS, STAGES = 4, 2
"""Of the sizes tried on a Hopper GPU, these were the fastest, or nearly so, forward and backward."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Span(NamedTuple):
    """Start and end of every cell's sample: [cells] int32 each."""

    first: Tensor
    """The first cell of the sample."""
    end: Tensor
    """One past its last cell."""


def span_of_cells(starts: Tensor, cells: int) -> Span:
    """Spans from the sample starts [S + 1], which begin with 0 and end with `cells`; without a device sync.

    >>> import torch
    >>> [part.tolist() for part in span_of_cells(torch.tensor([0, 2, 3, 3]), 3)]
    [[0, 0, 2], [2, 2, 3]]
    """
    lengths = starts.diff()
    first, end = (torch.repeat_interleave(part, lengths, output_size=cells) for part in (starts[:-1], starts[1:]))
    return Span(first.int(), end.int())


def attend_short(parts: Parts, span: Span, *, causal: bool, scale: float, out: Tensor, stats: Tensor) -> None:
    """Fill `out` [cells, H, D] and `stats` [cells, H], the log of the softmax's denominator. All tensors are dense."""
    query, key, _ = parts
    grid = (triton.cdiv(len(query), TILE), query.shape[1])
    _attend[grid](*parts, *span, out, stats, len(query), scale, *_sizes(query, key, causal), **_ways())


def differentiate_short(
    grad: Tensor, parts: Parts, span: Span, *, causal: bool, scale: float, out: Tensor, stats: Tensor, grads: Parts
) -> None:
    """Fill `grads`, the gradients of query, key and value. One program writes each tile, so the bits are the same every
    time."""
    query, key, _ = parts
    delta = torch.empty_like(stats)
    number, sizes = triton.cdiv(len(query), TILE), _sizes(query, key, causal)
    _differentiate_query[(number, query.shape[1])](
        *parts, out, grad, stats, *span, grads[0], delta, len(query), scale, *sizes, **_ways()
    )
    _differentiate_keys[(number, key.shape[1])](
        *parts, grad, stats, delta, *span, grads[1], grads[2], len(query), scale, *sizes, **_ways()
    )


def try_out(device: torch.device) -> None:
    """Run all kernels once on tiny tensors; Triton's error is raised where it cannot compile."""
    parts = [torch.zeros(1, 1, 16, device=device, dtype=torch.bfloat16) for _ in range(3)]
    span = span_of_cells(torch.tensor([0, 1], device=device), 1)
    rule: dict[str, Any] = {"causal": True, "scale": 1.0}
    out, stats = torch.empty_like(parts[0]), torch.empty(1, 1, device=device)
    attend_short(parts, span, **rule, out=out, stats=stats)
    differentiate_short(out, parts, span, **rule, out=out, stats=stats, grads=[torch.empty_like(p) for p in parts])


def _sizes(query: Tensor, key: Tensor, causal: bool) -> tuple[int, int, int, int, bool, int]:
    heads, width = query.shape[1:]
    return heads, heads // key.shape[1], width, max(triton.next_power_of_2(width), 16), causal, TILE


def _ways() -> dict[str, Any]:
    return {"num_warps": WARPS, "num_stages": STAGES}


# Shapes inside the kernels: a tile has T cells of one head. DEEP is the head size rounded up to a power of two.
# Nothing in one sample may reach another, not even NaN: where a product has zeros for the cells of other
# samples, those cells are cleaned first, since zero times NaN is NaN.


# What changes from row to row (cells, start of the statistics) is not specialised, so it never causes a recompile.


@triton.jit(do_not_specialize=["cells"], do_not_specialize_on_alignment=["Stats"])
def _attend(
    Query, Key, Value, First, End, Out, Stats, cells, scale,
    H: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    head, begin = tl.program_id(1), tl.program_id(0) * T
    q_cell = begin + tl.arange(0, T)
    column = tl.arange(0, DEEP)
    is_there = q_cell < cells
    at = (q_cell.to(tl.int64) * H + head)[:, None] * WIDTH + column[None, :]
    mask = is_there[:, None] & (column < WIDTH)[None, :]
    query = tl.load(Query + at, mask=mask, other=0.0)
    first = tl.load(First + q_cell, mask=is_there, other=cells)
    end, stop = _sees(End, q_cell, begin, cells, is_there, CAUSAL, T)
    most = tl.full([T], float("-inf"), tl.float32)
    total = tl.zeros([T], tl.float32)
    out = tl.zeros([T, DEEP], tl.float32)
    for start in range(tl.load(First + begin), stop, T):
        k_cell = start + tl.arange(0, T)
        k_at = (k_cell.to(tl.int64) * (H // SHARE) + head // SHARE)[:, None] * WIDTH + column[None, :]
        k_mask = (k_cell < cells)[:, None] & (column < WIDTH)[None, :]
        key = tl.load(Key + k_at, mask=k_mask, other=0.0)
        value = tl.load(Value + k_at, mask=k_mask, other=0.0)
        is_seen = (k_cell[None, :] >= first[:, None]) & (k_cell[None, :] < end[:, None])
        score = tl.dot(query, tl.trans(key)) * (scale * LOG2_E) + _spoils(value)[None, :]
        score = tl.where(is_seen, score, float("-inf"))
        above = tl.maximum(most, tl.max(score, 1))
        calm = tl.where(above == float("-inf"), 0.0, above)  # nothing seen yet: avoid infinity minus infinity
        weight = tl.exp2(score - calm[:, None])
        shrink = tl.exp2(most - calm)
        total = total * shrink + tl.sum(weight, 1)
        out = tl.dot(weight.to(value.dtype), _clean(value), out * shrink[:, None])
        most = above
    total = tl.where(is_there, total, 1.0)
    tl.store(Out + at, (out / total[:, None]).to(Out.dtype.element_ty), mask=mask)
    tl.store(Stats + q_cell * H + head, (most + tl.log2(total)) * LN_2, mask=is_there)


@triton.jit
def _sees(End, q_cell, begin, cells, is_there, CAUSAL: tl.constexpr, T: tl.constexpr):
    """The end (exclusive) of what each query sees, and of what the whole tile sees."""
    last = tl.minimum(begin + T, cells)
    if CAUSAL:
        end = tl.where(is_there, q_cell + 1, 0)
        stop = last
    else:
        end = tl.load(End + q_cell, mask=is_there, other=0)
        stop = tl.load(End + last - 1)
    return end, stop


@triton.jit
def _clean(tile):
    """The tile with non-finite values replaced by zeros."""
    return tl.where(tl.abs(tile.to(tl.float32)) < float("inf"), tile, 0.0).to(tile.dtype)


@triton.jit
def _spoils(tile):
    """[T] 0 for finite rows of a tile, NaN for others: added to the scores, it reaches the queries that see those
    rows."""
    return tl.sum(tl.where(tl.abs(tile.to(tl.float32)) < float("inf"), 0.0, float("nan")), 1)


@triton.jit(do_not_specialize=["cells"], do_not_specialize_on_alignment=["Stats", "Delta"])
def _differentiate_query(
    Query, Key, Value, Out, Grad, Stats, First, End, GradQuery, Delta, cells, scale,
    H: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Also fills `Delta` [cells, H], the product of each output with its gradient, for the kernel below."""
    head, begin = tl.program_id(1), tl.program_id(0) * T
    q_cell = begin + tl.arange(0, T)
    column = tl.arange(0, DEEP)
    is_there = q_cell < cells
    at = (q_cell.to(tl.int64) * H + head)[:, None] * WIDTH + column[None, :]
    mask = is_there[:, None] & (column < WIDTH)[None, :]
    query = tl.load(Query + at, mask=mask, other=0.0)
    grad = tl.load(Grad + at, mask=mask, other=0.0)
    out = tl.load(Out + at, mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(Delta + q_cell * H + head, delta, mask=is_there)
    stats = tl.load(Stats + q_cell * H + head, mask=is_there, other=0.0) * LOG2_E
    first = tl.load(First + q_cell, mask=is_there, other=cells)
    end, stop = _sees(End, q_cell, begin, cells, is_there, CAUSAL, T)
    of_query = tl.zeros([T, DEEP], tl.float32)
    for start in range(tl.load(First + begin), stop, T):
        k_cell = start + tl.arange(0, T)
        k_at = (k_cell.to(tl.int64) * (H // SHARE) + head // SHARE)[:, None] * WIDTH + column[None, :]
        k_mask = (k_cell < cells)[:, None] & (column < WIDTH)[None, :]
        key = tl.load(Key + k_at, mask=k_mask, other=0.0)
        value = tl.load(Value + k_at, mask=k_mask, other=0.0)
        is_seen = (k_cell[None, :] >= first[:, None]) & (k_cell[None, :] < end[:, None])
        score = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)
        weight = tl.where(is_seen, tl.exp2(score - stats[:, None]), 0.0)
        of_score = tl.where(is_seen, weight * (tl.dot(grad, tl.trans(value)) - delta[:, None]), 0.0)
        of_query = tl.dot(of_score.to(key.dtype), _clean(key), of_query)
    tl.store(GradQuery + at, (of_query * scale).to(GradQuery.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["cells"], do_not_specialize_on_alignment=["Stats", "Delta"])
def _differentiate_keys(
    Query, Key, Value, Grad, Stats, Delta, First, End, GradKey, GradValue, cells, scale,
    H: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Each program owns a tile of keys and loops over the queries that see it, in all heads that share it."""
    k_head, begin = tl.program_id(1), tl.program_id(0) * T
    k_cell = begin + tl.arange(0, T)
    column = tl.arange(0, DEEP)
    is_there = k_cell < cells
    at = (k_cell.to(tl.int64) * (H // SHARE) + k_head)[:, None] * WIDTH + column[None, :]
    mask = is_there[:, None] & (column < WIDTH)[None, :]
    key = tl.load(Key + at, mask=mask, other=0.0)
    value = tl.load(Value + at, mask=mask, other=0.0)
    end = tl.load(End + k_cell, mask=is_there, other=0)
    stop = tl.load(End + tl.minimum(begin + T, cells) - 1)
    if CAUSAL:
        first = tl.where(is_there, k_cell, cells)
        lowest = begin
    else:
        first = tl.load(First + k_cell, mask=is_there, other=cells)
        lowest = tl.load(First + begin)
    of_key = tl.zeros([T, DEEP], tl.float32)
    of_value = tl.zeros([T, DEEP], tl.float32)
    for member in range(SHARE):
        head = k_head * SHARE + member
        for start in range(lowest, stop, T):
            q_cell = start + tl.arange(0, T)
            q_at = (q_cell.to(tl.int64) * H + head)[:, None] * WIDTH + column[None, :]
            q_mask = (q_cell < cells)[:, None] & (column < WIDTH)[None, :]
            query = tl.load(Query + q_at, mask=q_mask, other=0.0)
            grad = tl.load(Grad + q_at, mask=q_mask, other=0.0)
            stats = tl.load(Stats + q_cell * H + head, mask=q_cell < cells, other=0.0) * LOG2_E
            delta = tl.load(Delta + q_cell * H + head, mask=q_cell < cells, other=0.0)
            is_seen = (q_cell[None, :] >= first[:, None]) & (q_cell[None, :] < end[:, None])
            score = tl.dot(key, tl.trans(query)) * (scale * LOG2_E)
            weight = tl.where(is_seen, tl.exp2(score - stats[None, :]), 0.0)
            spoiled = tl.where(is_seen, weight + _spoils(grad)[None, :], 0.0)
            of_value = tl.dot(spoiled.to(grad.dtype), _clean(grad), of_value)
            of_score = tl.where(is_seen, weight * (tl.dot(value, tl.trans(grad)) - delta[None, :]), 0.0)
            of_key = tl.dot(of_score.to(query.dtype), _clean(query), of_key)
    tl.store(GradKey + at, (of_key * scale).to(GradKey.dtype.element_ty), mask=mask)
    tl.store(GradValue + at, of_value.to(GradValue.dtype.element_ty), mask=mask)
