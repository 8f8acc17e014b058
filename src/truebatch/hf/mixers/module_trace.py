"""What every module of a model is given and gives in one call: few numbers a cell, enough to compare two calls.

forward hooks -> (module, call) -> its arguments and outputs -> where cells lie -> a projection of every cell
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from truebatch.hf.mixers.axes import Axes, cell_axes, name_axes
from truebatch.hf.mixers.group_call import Path
from truebatch.hf.mixers.group_mask import mask_of_tensor

DIRECTIONS = 4
"""Numbers kept of every cell: two different cells agree in all of them by chance only."""
HIDDEN = 1e4
"""Scores of hidden cells, whatever a mask has for them."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafTrace:
    """One argument or output of a call."""

    shape: tuple[int, ...]
    """Of a tensor or a `torch.Size` its sizes, of a whole number the number itself."""
    cells: Tensor | None = None
    """[T, DIRECTIONS], or [T, T, 1] for what lies along two axes of cells; None for what lies along none."""

    def part(self, first: Sequence[int], sizes: Sequence[int]) -> Tensor | None:
        """The block of cells that begins there."""
        if self.cells is None or self.cells.ndim - 1 != len(first):
            return None
        return self.cells[tuple(slice(a, a + n) for a, n in zip(first, sizes, strict=True))]


@dataclass(frozen=True, slots=True, eq=False)
class CallTrace:
    """One call of one module."""

    inputs: Mapping[Path, LeafTrace]
    outputs: Mapping[Path, LeafTrace]


Trace = Mapping[str, list[CallTrace]]
"""Module name -> its calls; modules in the order in which they end for the first time, the model last, as ""."""
CallAxes = tuple[Mapping[Path, Axes | None], Mapping[Path, Axes | None]]
"""The axes of the arguments and outputs of a call; None where something grows in another way than its row."""


@contextmanager
def traced(model: nn.Module, axes: Mapping[str, list[CallAxes]] | None = None) -> Iterator[dict[str, list[CallTrace]]]:
    """While open, calls are recorded; cells are kept where `axes` say where they lie."""
    found: dict[str, list[CallTrace]] = {}

    def note(name: str, args: Any, kwargs: Any, output: Any) -> None:
        calls = found.setdefault(name, [])
        known = axes[name][len(calls)] if axes and len(axes.get(name, ())) > len(calls) else ({}, {})
        calls.append(CallTrace(_leaves(_named(args, kwargs), known[0]), _leaves({"": output}, known[1])))

    handles = [
        module.register_forward_hook(
            lambda _m, args, kwargs, output, name=name: note(name, args, kwargs, output), with_kwargs=True
        )
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def call_axes(large: Trace, small: Trace, sizes: Mapping[str, tuple[int, int]]) -> dict[str, list[CallAxes]]:
    """What grew with the rows between two calls of a model, for modules called equally often in both."""
    found: dict[str, list[CallAxes]] = {}
    for name, calls in large.items():
        others = small.get(name, [])
        if len(calls) == len(others):
            pairs = zip(calls, others, strict=True)
            found[name] = [(_axes(a.inputs, b.inputs, sizes), _axes(a.outputs, b.outputs, sizes)) for a, b in pairs]
    return found


def _axes(
    large: Mapping[Path, LeafTrace], small: Mapping[Path, LeafTrace], sizes: Mapping[str, tuple[int, int]]
) -> dict[Path, Axes | None]:
    named = {path: name_axes(leaf.shape, small[path].shape, sizes) for path, leaf in large.items() if path in small}
    return {path: axes for path, axes in named.items() if axes is None or cell_axes(axes)}


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**{str(at): value for at, value in enumerate(args)}, **kwargs}


def _leaves(named: Mapping[str, Any], axes: Mapping[Path, Axes | None]) -> dict[Path, LeafTrace]:
    found = {}
    for name, value in named.items():
        for at, leaf in enumerate(tree_flatten(value)[0]):
            one = _leaf(leaf, axes.get((name, at)))
            if one is not None:
                found[name, at] = one
    return found


def _leaf(value: Any, axes: Axes | None) -> LeafTrace | None:
    if isinstance(value, torch.Size):
        return LeafTrace(tuple(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return LeafTrace((value,))
    if not isinstance(value, Tensor) or mask_of_tensor(value) is not None:
        return None
    along = [] if axes is None or len(axes) != value.ndim else cell_axes(axes)
    return LeafTrace(tuple(value.shape), _projected(value, along) if 0 < len(along) < 3 else None)


def _projected(value: Tensor, along: list[int]) -> Tensor:
    value = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()  # rotations may be complex
    cells = value.movedim(along, list(range(len(along))))
    cells = cells.reshape(*cells.shape[: len(along)], -1)
    cells = cells.to(torch.float64 if cells.dtype == torch.float64 else torch.float32).clamp(-HIDDEN, HIDDEN)
    number = DIRECTIONS if len(along) == 1 else 1
    return cells @ _directions(cells.shape[-1]).to(cells)[:, :number]


@functools.lru_cache(maxsize=64)
def _directions(width: int) -> Tensor:
    draw = torch.Generator().manual_seed(width)
    return torch.randn(width, DIRECTIONS, generator=draw) / math.sqrt(width)
