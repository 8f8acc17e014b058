"""Attention inside the segments of a table that lies on the host, as an operator that compiled models may call on a CPU.

[cells, H, D] + table -> one call of torch's kernel for the samples of each length -> output and statistics, or gradients

A compiled model cannot walk through lengths that change from row to row: it would compile again for each of them, or look
at all pairs of a row through a mask. Inside an operator it walks, by the kernel that is called as written too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from truebatch.tensors.fixedtable import define_attention, keep_keys

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What torch's kernel takes."""


def attend_on_host(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, causal: bool, scale: float
) -> Tensor:  # fmt: skip
    """[cells, H, D] attention inside each segment; heads of keys and values divide those of queries."""
    bounds = starts[:1]  # read by nobody: the table says all, since it lies on the host
    return _attend(query, key, value, starts, bounds, float(causal), scale)


def can_attend_on_host(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch has a kernel for these."""
    is_there = all(part.device.type == "cpu" and part.dtype == query.dtype for part in (query, key, value))
    return is_there and query.dtype in KINDS and query.shape[-1] == value.shape[-1]


def _groups(starts: Tensor) -> Iterator[tuple[int, list[int]]]:
    """The lengths of a table, and where the segments of each length begin."""
    groups: dict[int, list[int]] = {}
    for first, end in pairwise(starts.tolist()):
        if end > first:
            groups.setdefault(end - first, []).append(first)
    yield from groups.items()


def _in_a_row(*parts: Tensor) -> list[Tensor]:
    """[cells, H, D] whose D numbers follow each other: the kernel takes that for granted and does not look."""
    return [part if part.stride(-1) == 1 else part.contiguous() for part in parts]


def _take(part: Tensor, firsts: Sequence[int], length: int) -> Tensor:
    """[cells, H, ...] -> [n, H, L, ...]: segments of one length."""
    pieces = [part[first : first + length] for first in firsts]
    return (pieces[0][None] if len(pieces) == 1 else torch.stack(pieces)).transpose(1, 2)


def _put(part: Tensor, firsts: Sequence[int], found: Tensor) -> None:
    """The way back, into `part`."""
    for first, piece in zip(firsts, found.transpose(1, 2).unbind(0), strict=True):
        part[first : first + len(piece)] = piece


def _repeated(part: Tensor, share: int) -> Tensor:
    """[n, Hkv, L, D] -> [n, H, L, D]: the kernel wants as many heads of keys as of queries."""
    return part if share == 1 else part.repeat_interleave(share, dim=1)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, _bounds: Tensor, rule: Sequence[float]
) -> tuple[Tensor, Tensor]:
    keep_keys(key, value)
    out, lse = _forward_shapes(query)
    query, key, value = _in_a_row(query, key, value)
    share = query.shape[1] // key.shape[1]
    for length, firsts in _groups(starts):
        q, k, v = (_take(part, firsts, length) for part in (query, key, value))
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _repeated(k, share), _repeated(v, share), 0.0, bool(rule[0]), scale=rule[1]
        )
        _put(out, firsts, found)
        _put(lse, firsts, sums)
    return out, lse


def _forward_shapes(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    """Output, and the log of the softmax's denominator [cells, H]; zeros in cells that the table leaves out."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_zeros(query.shape), query.new_zeros(query.shape[:2], dtype=exact)


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
    grads = [part.new_zeros(part.shape) for part in (query, key, value)]
    grad, query, key, value, out = _in_a_row(grad, query, key, value, out)
    share = query.shape[1] // key.shape[1]
    for length, firsts in _groups(starts):
        g, q, k, v, o, sums = (_take(part, firsts, length) for part in (grad, query, key, value, out, lse))
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, _repeated(k, share), _repeated(v, share), o, sums, 0.0, bool(rule[0]), scale=rule[1]
        )
        _put(grads[0], firsts, of_query)
        for part, found in zip(grads[1:], (of_key, of_value), strict=True):
            _put(part, firsts, found if share == 1 else found.unflatten(1, (-1, share)).sum(2))
    return grads[0], grads[1], grads[2]


_attend = define_attention("attend_on_host", _forward, _backward, shapes=_forward_shapes)
