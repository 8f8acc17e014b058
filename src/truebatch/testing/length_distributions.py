"""Lengths like those of real datasets, for demonstrations, tests and benchmarks."""

from __future__ import annotations

from typing import Literal

import numpy as np

from truebatch.planning.rows import Ints

Distribution = Literal["chat", "bimodal", "patient"]
_LONGEST = 8192


def example_lengths(name: Distribution, num: int, *, seed: int = 0) -> Ints:
    """[num] lengths: `chat` (log-normal), `bimodal` (short and long questions), `patient` (a heavy tail)."""
    random = np.random.default_rng(seed)
    if name == "chat":
        lengths = random.lognormal(np.log(164), 1.1, num)
    elif name == "bimodal":
        is_short = random.random(num) < 0.5
        lengths = np.where(is_short, random.normal(50, 15, num), random.normal(2000, 300, num))
    else:
        lengths = 16 * (1 + random.pareto(1.15, num))
    return np.clip(lengths, 1, _LONGEST).astype(np.int64)
