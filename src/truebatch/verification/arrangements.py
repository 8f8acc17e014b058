"""Ways to lay the same samples into micro-batches. None may change what a sample gets.

Only `lengths` are looked at. The first row of an arrangement is never the longest sample: a model that takes row 0 for
the whole micro-batch, and one that forgets the padding, then fail in different places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from truebatch.batch.fields import Side
from truebatch.planning.rows import Rows, packed_row, padded_rows

Filling = Literal["declared", "garbage", "large", "nan"]
LAYOUTS = ("right", "left", "packed")


@dataclass(frozen=True, slots=True)
class ArrangedBatch:
    """One micro-batch of an arrangement."""

    rows: Rows
    side: Side = "right"
    filling: Filling = "declared"
    """What stands in the empty cells: the declared pad value, or something a right model never looks at."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A way to cut a step of samples into micro-batches."""

    name: str
    layout: str
    """right, left or packed: what a model must support for this arrangement to apply."""
    pieces: tuple[ArrangedBatch, ...]

    def filled(self, filling: Filling) -> Arrangement:
        """The same arrangement with other contents in its empty cells."""
        pieces = tuple(replace(piece, filling=filling) for piece in self.pieces)
        return Arrangement(f"{self.name}, {FILLED[filling]}", self.layout, pieces)


FILLED = {"garbage": "padding full of garbage", "large": "padding full of large numbers", "nan": "padding full of NaN"}


def alone(lengths: Sequence[int]) -> Arrangement:
    """The reference: every sample a micro-batch of its own, nothing padded."""
    return Arrangement("alone", "right", tuple(_padded([i], lengths) for i in range(len(lengths))))


def arrangements(lengths: Sequence[int]) -> list[Arrangement]:
    """All arrangements of these samples, simplest first. Every sample appears once in each."""
    ids = _mixed_order(lengths)
    half = (len(ids) + 1) // 2
    right = Arrangement("right padded", "right", (_padded(ids, lengths),))
    left = Arrangement("left padded", "left", (_padded(ids, lengths, side="left"),))
    return [
        right,
        Arrangement("permuted", "right", (_padded([ids[1], *ids[:1:-1], ids[0]], lengths),)),
        Arrangement("wider than needed", "right", (_padded(ids, lengths, extra=3 + max(lengths) // 2),)),
        Arrangement("beside a longer neighbour", "right", tuple(_padded(p, lengths) for p in _extremes(lengths))),
        Arrangement("cut in two", "right", (_padded(ids[:half], lengths), _padded(ids[half:], lengths))),
        Arrangement("cut in pairs", "right", tuple(_padded(ids[a : a + 2], lengths) for a in range(0, len(ids), 2))),
        right.filled("garbage"),
        right.filled("large"),
        left,
        left.filled("garbage"),
        Arrangement("packed", "packed", (_packed(ids, lengths),)),
        Arrangement("packed in another order", "packed", (_packed(ids[::-1], lengths),)),
        Arrangement("packed, cut in two", "packed", (_packed(ids[:half], lengths), _packed(ids[half:], lengths))),
    ]


def _mixed_order(lengths: Sequence[int]) -> list[int]:
    """Neither sorted nor as given, and the two samples that come first are shorter than the longest."""
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    shuffled = by_length[::2] + by_length[1::2][::-1]
    return shuffled if len(shuffled) < 4 else [shuffled[1], shuffled[0], *shuffled[2:]]


def _extremes(lengths: Sequence[int]) -> list[list[int]]:
    """The shortest with the longest, the second shortest with the second longest, and so on."""
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    pairs = len(by_length) // 2
    rest = [[i] for i in by_length[pairs : len(by_length) - pairs]]
    return [[by_length[k], by_length[-1 - k]] for k in range(pairs)] + rest


def _padded(ids: list[int], lengths: Sequence[int], *, side: Side = "right", extra: int = 0) -> ArrangedBatch:
    return ArrangedBatch(padded_rows(np.array(ids), max(lengths[i] for i in ids) + extra), side)


def _packed(ids: list[int], lengths: Sequence[int]) -> ArrangedBatch:
    return ArrangedBatch(packed_row(np.array(ids), sum(lengths[i] for i in ids)))
