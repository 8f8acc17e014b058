"""Attention inside the segments of a host table, as an operator that compiled models can call on a CPU.

[cells, H, D] + table -> one call of torch's kernel for neighbours of one length -> output and statistics, or gradients

A compiled model cannot loop over lengths that change from row to row: it would recompile for each of them, or compute
all pairs of a row under a mask. The operator runs the loop, with the kernel that eager mode calls too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from truebatch.attention.varlen_static import define_attention, keep_keys

SHARES_HEADS = torch.__version__ >= "2.13"  # compared as versions, not as strings
"""True if torch's kernel accepts fewer key heads than query heads; an older one would misread them."""
KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes torch's kernel accepts."""


def attend_on_host(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, causal: bool, scale: float
) -> Tensor:  # fmt: skip
    """[cells, H, D] attention inside each segment; heads of keys and values divide those of queries."""
    bounds = starts[:1]  # unused: the table is on the host and has the lengths
    return _attend(query, key, value, starts, bounds, float(causal), scale)


def can_attend_on_host(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if torch has a kernel for these tensors."""
    is_there = all(part.device.type == "cpu" and part.dtype == query.dtype for part in (query, key, value))
    return is_there and query.dtype in KINDS and query.shape[-1] == value.shape[-1]


class _Run(NamedTuple):
    """Adjacent segments of one length."""

    first: int
    number: int
    length: int

    def take(self, part: Tensor) -> Tensor:
        """[cells, H, ...] -> [n, H, L, ...], a view."""
        return part[self.cells].view(self.number, self.length, *part.shape[1:]).transpose(1, 2)

    def put(self, part: Tensor, found: Tensor) -> None:
        """The inverse: write back into `part`."""
        part[self.cells].view(self.number, self.length, *part.shape[1:]).copy_(found.transpose(1, 2))

    @property
    def cells(self) -> slice:
        return slice(self.first, self.first + self.number * self.length)


def _runs(starts: Tensor, wholes: Sequence[Tensor]) -> Iterator[_Run]:
    """The segments of a table; rows have their longest samples first, so that those of one length are neighbours. Cells
    of `wholes` that it leaves out become zero."""
    bounds = starts.tolist()
    for whole in wholes:
        whole[: bounds[0]] = 0
        whole[bounds[-1] :] = 0
    spans = [(end - first, first) for first, end in pairwise(bounds) if end > first]
    for length, some in groupby(spans, key=lambda span: span[0]):
        firsts = [first for _, first in some]
        yield _Run(firsts[0], len(firsts), length)


def _in_a_row(*parts: Tensor) -> list[Tensor]:
    """[cells, H, D] with a dense last dimension: the kernel assumes that and does not check."""
    return [part if part.stride(-1) == 1 else part.contiguous() for part in parts]


def _for_all_heads(part: Tensor, heads: int) -> Tensor:
    """[cells, Hkv, D] -> [cells, H, D], where the kernel needs as many key heads as query heads."""
    if SHARES_HEADS or part.shape[1] == heads:
        return part
    return part.repeat_interleave(heads // part.shape[1], dim=1)


def _of_own_heads(grad: Tensor, part: Tensor) -> Tensor:
    """The inverse for gradients: those of heads that share a key are summed."""
    cells, heads, width = part.shape
    return grad if grad.shape[1] == heads else grad.reshape(cells, heads, -1, width).sum(2)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, _bounds: Tensor, rule: Sequence[float]
) -> tuple[Tensor, Tensor]:
    keep_keys(key, value)
    return attend_segments(query, key, value, starts, causal=bool(rule[0]), scale=rule[1])


def attend_segments(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention inside each segment: output, and the log of the softmax's denominator [cells, H]."""
    out, lse = _forward_shapes(query)
    parts = _in_a_row(query, *(_for_all_heads(part, query.shape[1]) for part in (key, value)))
    for run in _runs(starts, (out, lse)):
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(run.take, parts), 0.0, causal, scale=scale
        )
        run.put(out, found)
        run.put(lse, sums)
    return out, lse


def span_forward(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """The same of one span of queries [n, H, D], each of which sees all keys [m, Hkv, D] of another one."""
    parts = _in_a_row(query, *(_for_all_heads(part, query.shape[1]) for part in (key, value)))
    found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(part[None].transpose(1, 2) for part in parts), 0.0, False, scale=scale
    )
    return found[0].transpose(0, 1), sums[0].transpose(0, 1)


def _forward_shapes(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    """Output, and the log of the softmax's denominator [cells, H]."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=exact)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    _bounds: Tensor,
    rule: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    return segments_backward(grad, query, key, value, out, lse, starts, causal=bool(rule[0]), scale=rule[1])


def segments_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attend_segments`."""
    keys, values = (_for_all_heads(part, query.shape[1]) for part in (key, value))
    parts = _in_a_row(grad, query, keys, values, out)
    grads = [part.new_empty(part.shape) for part in (query, keys, values)]
    for run in _runs(starts, grads):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(run.take, (*parts, lse)), 0.0, causal, scale=scale
        )
        for whole, part in zip(grads, found, strict=True):
            run.put(whole, part)
    return grads[0], _of_own_heads(grads[1], key), _of_own_heads(grads[2], value)


def span_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `span_forward`."""
    keys, values = (_for_all_heads(part, query.shape[1]) for part in (key, value))
    parts = _in_a_row(grad, query, keys, values, out)
    one, two, three = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(part[None].transpose(1, 2) for part in (*parts, lse)), 0.0, False, scale=scale
    )
    found = [part[0].transpose(0, 1) for part in (one, two, three)]
    return found[0], _of_own_heads(found[1], key), _of_own_heads(found[2], value)


_attend = define_attention("attend_on_host", _forward, _backward, shapes=_forward_shapes)
