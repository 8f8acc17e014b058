"""Which samples of a step are run alone and as cut: those at which a fault shows, not the first ones.

micro-batches -> longest, shortest, neighbours in shared rows -> rebuilt in their rows | each alone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.split import keep_samples, rows_of_batch, sample_alone, take_samples


def choose_places(batches: Sequence[MicroBatch], fields: Sequence[Field], number: int) -> list[list[int]]:
    """For every micro-batch the places of the samples to check: at most `number` of them over all.

    The longest and the shortest, each with a neighbour from its row (or from its micro-batch, in padded rows); then
    those of the row that most samples share; then others, evenly by length. Samples without a cell are left out.
    """
    where = [(b, at) for b, batch in enumerate(batches) for at in range(batch.num_samples)]
    rows = [rows_of_batch(batch, fields) for batch in batches]
    row_of = [np.repeat(np.arange(r.num_rows), np.diff(r.starts)) for r in rows]
    length = {place: _length(batches[place[0]], place[1]) for place in where}
    ranked = sorted((p for p in where if length[p]), key=lambda p: (length[p], p))
    if not ranked:
        return [[] for _ in batches]

    def mates(place: tuple[int, int]) -> list[tuple[int, int]]:
        b, at = place
        near = [p for p in ranked if p[0] == b and p != place]
        same = [p for p in near if row_of[b][p[1]] == row_of[b][at]]
        return same or near

    longest, shortest = ranked[-1], ranked[0]
    shared = Counter((b, row_of[b][at]) for b, at in ranked)
    crowded = max(ranked, key=lambda p: (rows[p[0]].layout == "packed", shared[p[0], row_of[p[0]][p[1]]]))
    wanted = [longest, *mates(longest)[:1], shortest, *mates(shortest)[-1:]]
    wanted += _evenly([crowded, *mates(crowded)], max(2, number // 2))
    wanted += [*_evenly(ranked, number), *ranked]
    chosen = sorted(list(dict.fromkeys(wanted))[:number])
    return [[at for b, at in chosen if b == index] for index in range(len(batches))]


def _length(batch: MicroBatch, place: int) -> int:
    axes = list(batch.axes.values())
    return sum(axis.lengths[place] for axis in axes if len(axis.lengths) == batch.num_samples) if axes else 1


def _evenly(places: Sequence[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    return [places[at] for at in np.linspace(0, len(places) - 1, min(number, len(places))).round().astype(int)]


@dataclass(frozen=True, slots=True, eq=False)
class CheckedSamples:
    """The chosen samples of a rank, as cut and alone."""

    cut: list[MicroBatch]
    alone: list[MicroBatch]
    narrow: list[MicroBatch]
    """As cut, without the empty cells of the samples not chosen: where memory has no room for those in fp32."""

    @classmethod
    def of(cls, batches: Sequence[MicroBatch], fields: Sequence[Field], number: int) -> CheckedSamples:
        """Rebuilt from their micro-batches: the same rows, as wide as they were, without the samples not chosen.

        So their neighbours, their order and the padding beside them are those of the step, and what they add up to can be
        told from the rest, which could not be done for micro-batches as they are.
        """
        chosen = choose_places(batches, fields, number)
        pairs = [(batch, places) for batch, places in zip(batches, chosen, strict=True) if places]
        return cls(
            [keep_samples(batch, fields, places) for batch, places in pairs],
            [sample_alone(batch, fields, at) for batch, places in pairs for at in places],
            [part for batch, places in pairs for part in take_samples(batch, fields, places)],
        )
