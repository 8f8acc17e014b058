"""Which dimensions of a tensor are rows and cells, and how to take the samples of a group out of it and put them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from truebatch.hf.mixers.sample_groups import AxisRows, SampleGroups

ROWS = "rows"
"""The dimension of rows; the others are named as the axes of a micro-batch, or not at all."""

Axes = tuple[str | None, ...]
"""A name for every dimension of a tensor: ("rows", "cells", None) for hidden states."""


def name_axes(one: Sequence[int], other: Sequence[int], sizes: Mapping[str, tuple[int, int]]) -> Axes | None:
    """The names of dimensions that grow with an axis, from the shapes of two calls; None if one grows in another way.

    >>> name_axes((1, 47, 8), (1, 30, 8), {"cells": (47, 30)})
    ('rows', 'cells', None)
    >>> name_axes((1, 8, 50), (1, 8, 33), {"cells": (47, 30)}) is None
    True
    """
    if len(one) != len(other):
        return None
    names: list[str | None] = []
    for pair in zip(one, other, strict=True):
        found = [axis for axis, known in sizes.items() if known == pair]
        if not found and pair[0] != pair[1]:
            return None
        names.append(found[0] if found and pair[0] != pair[1] else None)
    if any(names) and 1 in one:
        names[list(one).index(1)] = ROWS
    return tuple(names)


def cell_axes(axes: Axes) -> list[int]:
    """The dimensions along which cells lie."""
    return [at for at, name in enumerate(axes) if name not in (None, ROWS)]


def take_group(value: Tensor, axes: Axes, group: Mapping[str, AxisRows]) -> Tensor:
    """The samples of a group, with their rows where the packed rows were; a tensor without rows gives those of its
    first sample."""
    along = cell_axes(axes)
    if not along:
        return value
    first = value if ROWS in axes else value.unsqueeze(0)
    rows = axes.index(ROWS) if ROWS in axes else 0
    places = [at + (ROWS not in axes) for at in along]
    flat = first.movedim([rows, *places], list(range(1 + len(places))))
    tables = [group[str(axes[at])] for at in along]
    found = _cells(flat, tables[0]) if len(tables) == 1 else _pairs(flat, tables[0], tables[1])
    back = found.movedim(list(range(1 + len(places))), [rows, *places])
    return back if ROWS in axes else back[0]


def take_first(value: Tensor, axes: Axes, group: Mapping[str, AxisRows], folded: int | None) -> Tensor:
    """The first cells of the first row, for every row of a group alike."""
    for at, name in enumerate(axes):
        if name == ROWS and folded is None:
            number = next(iter(group.values())).shape[0]
            value = value.narrow(at, 0, 1).expand(*[number if d == at else -1 for d in range(value.ndim)])
        elif name not in (None, ROWS):
            value = value.narrow(at, 0, group[str(name)].shape[1])
    if folded is None:
        return value
    rows = next(iter(group.values())).shape[0]
    return value.repeat(*[rows if d == folded else 1 for d in range(value.ndim)])


def _cells(value: Tensor, rows: AxisRows) -> Tensor:
    """[B, T, ...] -> [n, L, ...]."""
    return value.reshape(-1, *value.shape[2:]).index_select(0, rows.cells.view(-1)).view(*rows.shape, *value.shape[2:])


def _pairs(value: Tensor, queries: AxisRows, keys: AxisRows) -> Tensor:
    """[B, T, T, ...] -> [n, L, L, ...]; keys in the padding are masked."""
    width, depth = value.shape[1], value.shape[2]
    row = (queries.cells // width)[:, :1, None]
    found = value[row, (queries.cells % width)[:, :, None], (keys.cells % depth)[:, None, :]]
    if keys.places is None:
        return found
    is_real = keys.is_real[:, None, :].view(keys.shape[0], 1, keys.shape[1], *[1] * (value.ndim - 3))
    if value.dtype == torch.bool:
        return found & is_real
    return found.masked_fill(~is_real, torch.finfo(value.dtype).min) if value.is_floating_point() else found


def put_groups(values: Sequence[Tensor], axes: Axes, groups: SampleGroups) -> Tensor:
    """What the groups gave, back in the packed rows; padding gets 0."""
    (at,) = cell_axes(axes)
    axis = str(axes[at])
    parts = []
    for value, group in zip(values, groups, strict=True):
        rows, first = group[axis], value if ROWS in axes else value.unsqueeze(0)
        place = axes.index(ROWS) if ROWS in axes else 0
        flat = first.movedim([place, at + (ROWS not in axes)], [0, 1])
        flat = flat.expand(*rows.shape, *flat.shape[2:]).reshape(-1, *flat.shape[2:])
        parts.append(flat if rows.places is None else flat.index_select(0, rows.places))
    joined = torch.cat(parts)
    B, T = groups.shapes[axis]
    whole = joined.new_zeros(B * T, *joined.shape[1:]).index_copy(0, groups.order[axis], joined)
    whole = whole.view(B, T, *joined.shape[1:])
    if ROWS in axes:
        return whole.movedim([0, 1], [axes.index(ROWS), at])
    back = whole.movedim(1, at + 1)
    return back[0] if B == 1 else back


def group_size(value: Any, axes: Axes, group: Mapping[str, AxisRows]) -> Any:
    """A shape or a number of cells as it is in a group."""
    if isinstance(value, int):
        return group[str(axes[0])].shape[1] if axes[0] else value
    first = next(iter(group.values()))
    sizes = [first.shape[0] if name == ROWS else group[name].shape[1] if name else size
             for name, size in zip(axes, value, strict=True)]  # fmt: skip
    return torch.Size(sizes)
