"""Packed attention on a CPU: one call a sample against the dense block mask, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.benchmark import Benchmark, Row, option
from truebatch.attention.api import attend
from truebatch.batch.segments import Segments, packed_segments

KERNELS = {"one call a sample": "per_segment", "dense block mask": "block"}
LEAST_RATIO, MOST_DIFFERENCE = 5, 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """One packed row."""

    cells: int = option(16384, "Of the row.")
    segments: int = option(40, "Samples in the row.")
    heads: int = option(8, "Query heads.")
    kv_heads: int = option(8, "Key heads.")
    head_size: int = option(64, "Width of a head.")
    repeats: int = option(2, "Rounds, of which the best counts.")
    seed: int = option(0, "Of lengths and values.")


@dataclass(frozen=True, slots=True)
class PackedRow:
    """What both kernels are called with, and what they must give."""

    parts: list[Tensor]
    grad: Tensor
    segments: Segments
    longest: int
    expected: list[Tensor]


def prepare(options: AttentionOptions, case: str) -> PackedRow:
    """Random values over lengths that fill the row."""
    torch.manual_seed(options.seed)
    lengths = draw_lengths(options.cells, options.segments, options.seed)
    heads = (options.heads, options.kv_heads, options.kv_heads)
    parts = [torch.randn(1, h, options.cells, options.head_size, requires_grad=True) for h in heads]
    grad = torch.randn(1, options.heads, options.cells, options.head_size)
    segments = packed_segments(lengths)
    return PackedRow(parts, grad, segments, max(lengths), run("per_segment", parts, segments, grad))


def draw_lengths(cells: int, segments: int, seed: int) -> list[int]:
    """Log-normal lengths that add up to `cells`."""
    shares = np.random.default_rng(seed).lognormal(sigma=0.6, size=segments)
    lengths = np.maximum(1, np.floor(shares / shares.sum() * cells)).astype(int)
    lengths[lengths.argmax()] += cells - lengths.sum()
    return [int(length) for length in lengths]


def run(kernel: str, parts: list[Tensor], segments: Segments, grad: Tensor) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    out = attend(*parts, segments, causal=True, kernel=kernel)
    return [out.detach(), *torch.autograd.grad(out, parts, grad)]


def measure(row: PackedRow, method: str) -> Row:
    """Seconds forward and backward, and the largest difference from one call a sample."""
    start = time.perf_counter()
    found = run(KERNELS[method], row.parts, row.segments, row.grad)
    seconds = time.perf_counter() - start
    differences = [float((one - other).abs().max()) for one, other in zip(found, row.expected, strict=True)]
    return {"seconds": seconds, "max_difference": max(differences), "longest": row.longest}


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """How many times as long the dense mask takes."""
    seconds = {row["method"]: row["seconds"] for row in rows}
    if len(seconds) < len(KERNELS):
        return {}
    return {
        "ratios": {"dense block mask / one call a sample": seconds["dense block mask"] / seconds["one call a sample"]}
    }


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """A gain too small, or kernels that do not agree."""
    small = [
        f"{name} is {ratio:.2f}, not {LEAST_RATIO}"
        for name, ratio in result.get("ratios", {}).items()
        if ratio < LEAST_RATIO
    ]
    far = [row for row in result["rows"] if row["max_difference"] > MOST_DIFFERENCE]
    return small + [f"{row['method']} differs by {row['max_difference']:.1e}" for row in far]


BENCHMARK = Benchmark(
    name="attention",
    about=__doc__,
    options=AttentionOptions,
    cases=lambda options: [f"{options.cells} cells of {options.segments} samples"],
    methods=lambda options: list(KERNELS),
    prepare=prepare,
    measure=measure,
    rounds=lambda options: options.repeats,
    best_of="seconds",
    summary=summarize,
    problems=find_problems,
)
