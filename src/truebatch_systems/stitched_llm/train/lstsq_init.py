"""Where the adapter starts: the linear map that fits the two residual streams best, from sums over real tokens.

tokens -> X after layer k of A, Y before layer j of B -> sums, one micro-batch at a time -> min ||[X 1] W - Y||
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from truebatch.errors import DataError

_SMALLEST = 1e-13
"""Directions whose share of the largest variance is below this are noise of fp32, and left out."""


@dataclass(slots=True, eq=False)
class NormalEquations:
    """Sums that the least-squares map is solved from; their size does not grow with the number of tokens."""

    count: int
    sum_x: Tensor
    sum_y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    """[width_out]: squares of Y, summed."""

    @classmethod
    def empty(cls, width_in: int, width_out: int, device: torch.device | str = "cpu") -> NormalEquations:
        """Nothing seen yet."""
        shapes = ((width_in,), (width_out,), (width_in, width_in), (width_in, width_out), (width_out,))
        return cls(0, *(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in [n, width_in] and [n, width_out], the two streams at the same n real tokens."""
        x, y = x.double(), y.double()
        self.count += len(x)
        self.sum_x += x.sum(0)
        self.sum_y += y.sum(0)
        self.xx += x.T @ x
        self.xy += x.T @ y
        self.yy += y.square().sum(0)

    def solve(self) -> Solution:
        """The map of the smallest squared error over all tokens taken in."""
        if self.count < 2:
            raise DataError(
                "a least-squares start needs tokens to fit on", seen=f"{self.count} tokens", do="give more text"
            )
        mean_x, mean_y = self.sum_x / self.count, self.sum_y / self.count
        xx = self.xx - self.count * torch.outer(mean_x, mean_x)
        xy = self.xy - self.count * torch.outer(mean_x, mean_y)
        values, vectors = torch.linalg.eigh(xx)
        is_kept = values > _SMALLEST * values[-1].clamp(min=0)
        inverse = torch.where(is_kept, 1 / torch.where(is_kept, values, 1), 0)
        weight = vectors @ (inverse[:, None] * (vectors.T @ xy))
        explained = float((weight * xy).sum())
        total = float((self.yy - self.count * mean_y.square()).sum())
        fitted = weight.T @ xx @ weight
        return Solution(
            weight=weight,
            bias=mean_y - mean_x @ weight,
            residual=(max(total - explained, 0.0) / total) ** 0.5 if total > 0 else 0.0,
            directions=torch.linalg.eigh(fitted)[1].flip(1),
            centre=mean_x,
            count=self.count,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The best linear map from one residual stream to the other."""

    weight: Tensor
    """[width_in, width_out]."""
    bias: Tensor
    residual: float
    """||Y - fit|| / ||Y - mean of Y||: 0 is perfect, 1 is no better than a constant."""
    directions: Tensor
    """[width_out, width_out]: where the fitted stream varies most, first; a low_rank adapter keeps the first ones."""
    centre: Tensor
    """[width_in]: the mean of X."""
    count: int
    """Tokens it was fitted on."""
