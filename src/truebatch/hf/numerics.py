"""Whether rounding explains how far a quick way is from the plain one, when a model takes both for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from truebatch.training.memory.oom import is_out_of_memory

HALF = (torch.bfloat16, torch.float16)
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
CLOSE_IN_HALF = 0.05
"""Relative distances that rounding explains. A sample that sees its neighbour, or a wrong cell, is off by more."""
DOUBTFUL = 0.3
"""In half precision a deep model may come as far by rounding alone; then fp32 decides."""
MOST_ROUNDING = 1.25
"""A quick way may be this many times as far from fp32 as the plain one. Seeing a wrong cell is rounding's many times."""


def distance(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def are_close(found: Tensor, wanted: Tensor, exact: Callable[[], Tensor] | None = None) -> bool:
    """Whether rounding explains how far results are from those wanted.

    `exact` gives them in fp32; it is asked where half precision leaves doubt, and without room for it doubt is a no.
    """
    far = distance(found, wanted)
    if exact is None or wanted.dtype not in HALF or far < CLOSE_IN_HALF or far > DOUBTFUL:
        return far < CLOSE.get(wanted.dtype, CLOSE_IN_HALF)
    try:
        true = exact()
    except Exception as error:  # memory runs out in errors of many classes
        if not is_out_of_memory(error):
            raise
        return False
    return distance(found, true) <= MOST_ROUNDING * distance(wanted, true)


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """While open, all weights and buffers of half precision are fp32, beside what they were; afterwards they are that again."""
    half = {id(one): one for one in (*model.parameters(), *model.buffers()) if one.dtype in HALF}
    held = [(one, one.data) for one in half.values()]  # put back as they are: that needs no room and rounds nothing
    try:
        with torch.inference_mode(False):  # even if the caller is in inference mode: weights must stay trainable
            for one, values in held:
                one.data = values.float()
        yield
    finally:
        for one, values in held:
            one.data = values
