"""What rounding alone does to a model: the same model again, each module's result moved by as much as a dtype may."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

INT8_STEP = 1 / 127
"""Of the largest weight of a row: the grid that symmetric int8 weights lie on."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is rounded in one of several rounded runs."""

    dtype: torch.dtype
    """Of the results of modules."""
    weights: Collection[str] = field(default_factory=frozenset)
    """Parameters that are rounded, too: those that two engines do not share bit by bit."""
    weight_dtype: torch.dtype = torch.float32
    """What they are rounded to; int8 stands for a grid over each row."""


@contextmanager
def rounded(model: nn.Module, rounding: Rounding, seed: int) -> Iterator[None]:
    """The model with every floating result and the named weights moved by up to one rounding, put back afterwards."""
    draw = torch.Generator().manual_seed(seed)
    kept = {name: p.data for name, p in model.named_parameters() if name in rounding.weights}
    move = _mover(rounding.dtype, draw)
    handles = [module.register_forward_hook(lambda _m, _a, value: tree_map(move, value)) for module in model.modules()]
    try:
        for name, parameter in model.named_parameters():
            if name in kept:
                parameter.data = moved_weight(parameter.data, rounding.weight_dtype, draw)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in model.named_parameters():
            if name in kept:
                parameter.data = kept[name]


def moved_weight(weight: Tensor, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """A weight rounded up or down by chance to a dtype's grid, so that its mean stays."""
    if not weight.is_floating_point() or not weight.numel():
        return weight
    if dtype is torch.int8:
        if weight.ndim < 2:
            return weight
        step = weight.abs().amax(-1, keepdim=True) * INT8_STEP
    else:
        # one unit in the last place at the size of each entry
        step = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(weight.abs().float()))).to(weight.dtype)
    places = weight / step.clamp_min(torch.finfo(weight.dtype).tiny)
    below = places.floor()
    return torch.where(step > 0, (below + (_uniform(weight, draw) < places - below).to(weight.dtype)) * step, weight)


def _mover(dtype: torch.dtype, draw: torch.Generator) -> Callable[[Any], Any]:
    """Moves a tensor by up to half a unit in the last place of each entry, and of the size entries have along a row.

    The second part stands for sums in which larger numbers cancel.
    """
    half = torch.finfo(dtype).eps / 2

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel() or not value.ndim:
            return value
        size = value.square().mean(-1, keepdim=True).sqrt()
        gap = half * (2 * _uniform(value, draw) - 1) * (value.abs() + size)
        return value + gap.nan_to_num(0.0, 0.0, 0.0).to(value.dtype)

    return move


def _uniform(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=draw, dtype=torch.float32).to(like.device, like.dtype)
