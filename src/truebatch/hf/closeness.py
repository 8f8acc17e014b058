"""Whether rounding explains how far a quick way is from the plain one, when a model takes both for the first time."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
CLOSE_IN_HALF = 0.05
"""Relative distances that rounding explains. A sample that sees its neighbour, or a wrong cell, is off by more."""


def distance(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def are_close(found: Tensor, wanted: Tensor) -> bool:
    """Whether rounding explains how far results are from those wanted."""
    return distance(found, wanted) < CLOSE.get(wanted.dtype, CLOSE_IN_HALF)
