"""Which candidate is the right one: cross entropy over similarities, a chunk of anchors at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK = 1024
"""Anchors whose similarities are in memory at a time; they are made again in the backward pass."""


def ranking_nll(anchors: Tensor, candidates: Tensor, *, scale: float, chunk: int = CHUNK) -> Tensor:
    """The sum over anchors of -log softmax at their own candidate: the first ones, in the order of the anchors.

    Similarities are cosines times `scale`.

    >>> import torch
    >>> anchors, candidates = torch.eye(3), torch.eye(3)[[0, 1, 2, 1]]
    >>> ranking_nll(anchors, candidates, scale=20.0) < ranking_nll(anchors, candidates, scale=1.0)
    tensor(True)
    """
    asked, given = functional.normalize(anchors, dim=-1), functional.normalize(candidates, dim=-1)
    right = torch.arange(len(anchors), device=anchors.device)
    parts = [
        checkpoint(_nll, one, given, own, scale, use_reentrant=False)
        for one, own in zip(torch.split(asked, chunk), torch.split(right, chunk), strict=True)
    ]
    return torch.stack(parts).sum()


def _nll(anchors: Tensor, candidates: Tensor, right: Tensor, scale: float) -> Tensor:
    return functional.cross_entropy(anchors @ candidates.T * scale, right, reduction="sum")
