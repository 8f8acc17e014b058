"""Attention of one layer on a GPU, packed and even, kernel by kernel: where the gap between the two comes from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from truebatch.attention.cudnn_graph import plans_are_possible
from truebatch.attention.varlen import call_varlen
from truebatch.batch.segments import Segments, packed_segments
from truebatch.testing.length_distributions import example_lengths

HEADS, KEY_HEADS, WIDTH = 32, 4, 64
Parts = tuple[Tensor, Tensor, Tensor]


def explore_attention(*, longest: int, cells: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of forward and backward of one layer for every way of calling attention, or why it cannot."""
    lengths = _row_of_lengths(longest, cells)
    length = max(8 * round(float((lengths**2).sum() / lengths.sum()) / 8), 8)
    even = (cells // length, length)
    for backend in (None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        yield _even_rows(even, backend)
    yield _one_table("even rows, varlen", packed_segments([length] * even[0]))
    yield _one_table("packed as planned, exact table", packed_segments(lengths, cells=cells))
    fixed = packed_segments(lengths, cells=cells, slots=128, max_length=longest)
    yield _one_table("packed as planned, fixed table of 128", fixed)
    yield _with_bounds("packed as planned, table of 2048 cut", packed_segments(lengths, cells=cells, slots=2048))
    in_order = packed_segments(np.sort(lengths)[::-1], cells=cells, slots=2048)
    yield _with_bounds("packed longest first, table of 2048 cut", in_order)
    if plans_are_possible():
        yield _with_bounds("packed longest first, cuDNN by plan", in_order, planned=True)
        yield _with_bounds("even rows, cuDNN by plan", packed_segments([length] * even[0]), planned=True)


def _even_rows(even: tuple[int, int], backend: SDPBackend | None) -> dict[str, Any]:
    parts = _parts(even[0] * even[1])
    rows = tuple(part.view(*even, part.shape[1], WIDTH).transpose(1, 2) for part in parts)
    name = "default" if backend is None else backend.name
    return _row(f"even rows of {even[1]}, sdpa {name}", lambda: _sdpa(rows, backend), parts)


def _one_table(name: str, segments: Segments) -> dict[str, Any]:
    parts, table = _parts(segments.num_cells), segments.to("cuda")
    return _row(name, lambda: _varlen(parts, table, table.max_length), parts)


def _with_bounds(name: str, segments: Segments, *, planned: bool = False) -> dict[str, Any]:
    parts, table = _parts(segments.num_cells), segments.to("cuda")
    bounds = segments.bounds_tensor
    run = lambda: _varlen(parts, table, bounds, planned=planned)  # noqa: E731
    row = _row(name, run, parts)
    return row if row["ms"] is None else {**row, "difference": _difference(parts, segments, run)}


def _row_of_lengths(longest: int, cells: int) -> Any:
    drawn = np.minimum(example_lengths("chat", 1000, seed=3), longest)
    return drawn[np.cumsum(drawn) <= cells - 1]


def _parts(cells: int) -> Parts:
    shapes = [(cells, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    one, two, three = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    return one, two, three


def _sdpa(rows: tuple[Tensor, ...], backend: SDPBackend | None) -> Tensor:
    query, key, value = rows
    if backend is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _varlen(parts: Parts, table: Segments, bound: int | Tensor, *, planned: bool = False) -> Tensor:
    return call_varlen(*parts, table.starts, max_length=bound, causal=True, window=None, scale=None, planned=planned)


def _difference(parts: Parts, segments: Segments, run: Callable[[], Tensor]) -> float:
    """The largest relative distance, over output and gradients, to one call of attention a sample."""
    weight = torch.randn_like(parts[0])
    used = sum(segments.sample_lengths)
    weight[used:] = 0

    def alone() -> Tensor:
        pieces = [torch.split(part[:used], list(segments.sample_lengths)) for part in parts]
        rows = ([piece[i][None].transpose(1, 2) for piece in pieces] for i in range(len(segments.sample_lengths)))
        # squeeze, not [0]: its gradient would lie otherwise than a model's, and cuDNN's plans of these shapes with it.
        outs = [_sdpa(tuple(row), None).squeeze(0).transpose(0, 1) for row in rows]
        return torch.cat([*outs, torch.zeros_like(parts[0][used:])])

    results = []
    for attend in (run, alone):
        out = attend()
        grads = torch.autograd.grad(out, parts, weight)
        results.append([out[:used].detach(), *(grad[:used] for grad in grads)])
    pairs = zip(*results, strict=True)
    return max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)


def _row(name: str, run: Callable[[], Tensor], parts: Parts) -> dict[str, Any]:
    try:
        return {"way": name, "ms": _milliseconds(run, parts)}
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        return {"way": name, "ms": None, "error": f"{type(error).__name__}: {str(error)[:300]}"}


def _milliseconds(run: Callable[[], Tensor], parts: Parts) -> dict[str, float]:
    forward, both = [], []
    out = run()
    weight = torch.randn_like(out)
    for _ in range(15):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        marks[0].record()
        out = run()
        marks[1].record()
        torch.autograd.grad(out, parts, weight)
        marks[2].record()
        torch.cuda.synchronize()
        forward.append(marks[0].elapsed_time(marks[1]))
        both.append(marks[0].elapsed_time(marks[2]))
    return {"forward": round(statistics.median(forward[5:]), 4), "both": round(statistics.median(both[5:]), 4)}
