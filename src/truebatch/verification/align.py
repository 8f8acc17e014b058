"""Of a result that is longer in a micro-batch than alone, the cells that are the sample's own.

A padded result is longer than alone, and rightly so. A result with something more in it is longer too, and wrong. What
tells them apart: padding comes in micro-batches whose results all have one width, and of whole numbers it is one value
throughout, or as long as the sample's own padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the result of a sample came out of its micro-batch."""

    is_stacked: bool
    """True if all results of the micro-batch have one shape, as those of a padded tensor have."""
    length: int
    """Cells of the sample."""
    width: int
    """Cells of the longest sample beside it."""


def place_of(parts: Sequence[Tensor], ids: Sequence[int], lengths: Sequence[int]) -> dict[int, Alignment]:
    """The place of every sample of one micro-batch, from its results under one name."""
    is_stacked = len({part.shape for part in parts}) == 1
    width = max((lengths[i] for i in ids), default=0)
    return {i: Alignment(is_stacked, lengths[i], width) for i in ids}


def own_cells(
    values: Mapping[int, Tensor], alone: Mapping[int, Tensor], places: Mapping[int, Alignment]
) -> dict[int, list[Tensor]]:
    """Sample -> the parts of its result that may be its own, each of the shape it has alone; none if there is none."""
    bare = {i: without_leading(values[i], alone[i]) for i in alone}
    longer = {i for i in alone if bare[i].shape != alone[i].shape}
    pad = _common_pad([(bare[i], alone[i]) for i in longer])
    return {i: _windows(bare[i], alone[i], places.get(i), pad) if i in longer else [bare[i]] for i in alone}


def without_leading(value: Tensor, other: Tensor) -> Tensor:
    """`value` without a leading axis of one sample that `other` has not."""
    return value[0] if value.ndim == other.ndim + 1 and value.shape[0] == 1 else value


def _windows(value: Tensor, alone: Tensor, place: Alignment | None, pad: Tensor | None) -> list[Tensor]:
    if place is None or not place.is_stacked or not _is_longer(value, alone):
        return []
    number, spare = len(alone), len(value) - len(alone)
    starts: Iterable[int] = {0, spare}
    if not (value.is_floating_point() or value.is_complex()) and not _is_own_padding(value, alone, place):
        starts = [s for s in range(spare + 1) if _is_all(value[:s], pad) and _is_all(value[s + number :], pad)]
    elif pad is not None:
        starts = {*starts, *_padded_starts(value, number, pad)}
    return [value[start : start + number] for start in sorted(starts)]


def _is_longer(value: Tensor, alone: Tensor) -> bool:
    return value.ndim == alone.ndim > 0 and value.shape[1:] == alone.shape[1:] and len(value) > len(alone)


def _is_own_padding(value: Tensor, alone: Tensor, place: Alignment) -> bool:
    """True if the result is longer in the measure in which the sample is padded: an entry a cell."""
    if place.length >= place.width:
        return False
    return abs(len(alone) - len(value) * place.length / place.width) < 1


def _is_all(cells: Tensor, pad: Tensor | None) -> bool:
    return len(cells) == 0 or (pad is not None and bool((cells == pad).all()))


def _padded_starts(value: Tensor, number: int, pad: Tensor) -> list[int]:
    """Where a result may begin that is padded on both sides."""
    is_pad = (value == pad).flatten(1).all(1) if value.ndim > 1 else value == pad
    before = int(is_pad.long().cumprod(0).sum())
    after = int(is_pad.flip(0).long().cumprod(0).sum())
    spare = len(value) - number
    return list(range(max(0, spare - after), min(before, spare) + 1))


def _common_pad(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The cell that most results have beyond their own at either end."""
    ends: Counter[tuple[float, ...]] = Counter()
    kept: dict[tuple[float, ...], Tensor] = {}
    for value, alone in pairs:
        if not _is_longer(value, alone) or value.is_complex():
            continue
        for cell in _outer_cells(value, alone):
            key = tuple(cell.flatten().tolist())
            ends[key] += 1
            kept[key] = cell
    return kept[ends.most_common(1)[0][0]] if ends else None


def _outer_cells(value: Tensor, alone: Tensor) -> list[Tensor]:
    """The last cell of a result that begins as alone, the first of one that ends so, else both."""
    number, wanted = len(alone), alone.to(value)
    if torch.equal(value[:number], wanted):
        return [value[-1]]
    return [value[0]] if torch.equal(value[len(value) - number :], wanted) else [value[0], value[-1]]
