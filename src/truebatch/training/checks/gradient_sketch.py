"""A gradient as a few numbers a parameter, so that several gradients can be compared while only one is in memory.

gradient of a parameter -> a fixed sign for every entry -> summed into 1,024 numbers
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from truebatch.batch.keyed_random import keyed_bits

SIZE = 1 << 10
"""Numbers kept of a parameter; one that has no more entries is kept whole, and compared exactly."""
CHUNK = 1 << 20
"""Entries that are taken at a time: bounds the memory of the copy."""
_KEY = 0x7472756562617463

Sketch = dict[str, Tensor]
"""Parameter name -> its numbers."""


def sketch_tensor(values: Tensor) -> Tensor:
    """At most 1,024 numbers that add up like the tensors they stand for: a linear map, the same for every tensor.

    Entry j gets a keyed sign and is added to number j mod 1,024. For a difference x of two tensors, the squared norm of the
    difference of their numbers has the expectation ||x||^2 over the signs and a variance of at most 2 ||x||^4 / 1,024:
    a norm is known to within 5 % as a rule, and an x that is not zero does not vanish for fewer than 1,024 entries.
    """
    flat = (values.to_dense() if values.is_sparse else values).detach().flatten()
    exact = torch.float32 if flat.device.type == "mps" else torch.float64  # which has no doubles
    if flat.numel() <= SIZE:
        return flat.to(exact, copy=True)
    total = torch.zeros(SIZE, dtype=exact, device=flat.device)
    signs = _signs(flat.device).to(exact)
    for number, chunk in enumerate(torch.split(flat, CHUNK)):
        # Turned by one place a chunk: else entries that lie a chunk apart would always have the same sign.
        signed = chunk.to(exact) * signs.roll(number)[: chunk.numel()]
        whole = signed.numel() // SIZE * SIZE
        total += signed[:whole].view(-1, SIZE).sum(0)
        total[: signed.numel() - whole] += signed[whole:]
    return total


@lru_cache(maxsize=4)
def _signs(device: torch.device) -> Tensor:
    """[CHUNK] int8: 1 or -1."""
    bits = keyed_bits(torch.tensor(_KEY), torch.arange(CHUNK)) & 1
    return (bits * 2 - 1).to(torch.int8).to(device)


def squared_norms(one: Mapping[str, Tensor], other: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """Of every parameter: the squared norm of a gradient, or of the difference of two. One that is absent is zero."""
    found = {}
    for name in {**one, **(other or {})}:
        parts = [one.get(name), None if other is None else other.get(name)]
        given = [part for part in parts if part is not None]
        gap = given[0] if len(given) == 1 else given[0] - given[1]
        found[name] = float(gap.square().sum())
    return found


def norm(squares: Mapping[str, float]) -> float:
    """The norm over all parameters as one vector."""
    return math.sqrt(math.fsum(squares.values())) if all(map(math.isfinite, squares.values())) else math.nan
