"""Packed attention on a CPU: one call a sample against the dense block mask, forward and backward.

    python -m benchmarks attention --cells 16384 --segments 40 --out docs/results/attention.json

Both ways run in one process on the same tensors, in turns; the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truebatch.attention.api import attend
from truebatch.batch.segments import Segments, packed_segments


def draw_lengths(cells: int, segments: int, seed: int) -> list[int]:
    """Log-normal lengths that add up to `cells`."""
    shares = np.random.default_rng(seed).lognormal(sigma=0.6, size=segments)
    lengths = np.maximum(1, np.floor(shares / shares.sum() * cells)).astype(int)
    lengths[lengths.argmax()] += cells - lengths.sum()
    return [int(length) for length in lengths]


def run(kernel: str, parts: list[Tensor], segments: Segments, grad: Tensor) -> tuple[float, list[Tensor]]:
    start = time.perf_counter()
    out = attend(*parts, segments, causal=True, kernel=kernel)
    grads = torch.autograd.grad(out, parts, grad)
    return time.perf_counter() - start, [out.detach(), *grads]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(args.seed)
    lengths = draw_lengths(args.cells, args.segments, args.seed)
    segments = packed_segments(lengths)
    heads = (args.heads, args.kv_heads, args.kv_heads)
    parts = [torch.randn(1, h, args.cells, args.head_size, requires_grad=True) for h in heads]
    grad = torch.randn(1, args.heads, args.cells, args.head_size)
    seconds: dict[str, list[float]] = {"per_segment": [], "block": []}
    results: dict[str, list[Tensor]] = {}
    for _ in range(args.repeats):
        for kernel, times in seconds.items():
            elapsed, results[kernel] = run(kernel, parts, segments, grad)
            times.append(elapsed)
    pairs = zip(results["per_segment"], results["block"], strict=True)
    return {
        "cells": args.cells,
        "segments": args.segments,
        "longest": max(lengths),
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_size": args.head_size,
        "seconds_per_segment": min(seconds["per_segment"]),
        "seconds_block": min(seconds["block"]),
        "ratio": min(seconds["block"]) / min(seconds["per_segment"]),
        "max_difference": max(float((one - other).abs().max()) for one, other in pairs),
    }


def hardware() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=16384)
    parser.add_argument("--segments", type=int, default=40)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    result = compare(args)
    result["command"] = " ".join(["python", "-m", "benchmarks", "attention", *sys.argv[1:]])
    result["date"] = datetime.now(UTC).date().isoformat()
    result["hardware"] = hardware()
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if result["ratio"] >= 5 and result["max_difference"] <= 1e-5 else 1)


if __name__ == "__main__":
    main()
