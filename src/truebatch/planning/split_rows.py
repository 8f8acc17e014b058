"""Split planned micro-batches under a lower budget, without planning again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from truebatch.errors import PlanError
from truebatch.planning.config import MicroBatchLimits
from truebatch.planning.rows import Ints, Rows, packed_row, padded_rows

_NO_COSTS: Mapping[str, ArrayLike] = {}


def split_rows(
    rows: Rows, lengths: NDArray[Any], limits: MicroBatchLimits, *, costs: Mapping[str, ArrayLike] = _NO_COSTS
) -> list[Rows]:
    """The same samples in the same order, in micro-batches within every limit; one that fits is unchanged.

    `lengths` and `costs` are those of the whole dataset. Rows stay whole where they fit; a packed row that does not is
    cut between samples, and its parts have as many cells as tokens.
    """
    columns = {name: np.asarray(costs[name])[rows.ids] for name in limits.costs}
    taken = _Taken(np.asarray(lengths)[rows.ids].astype(np.int64), columns, limits, rows)
    if rows.num_samples == 0 or taken.fits(0, rows.num_rows):
        return [rows]
    taken.check_alone()
    answer: list[Rows] = []
    first = 0
    while first < rows.num_rows:
        last = first
        while last < rows.num_rows and taken.fits(first, last + 1):
            last += 1
        if last == first:
            answer += _split_row(rows, first, taken)
            last += 1
        else:
            answer.append(_rows_between(rows, first, last, taken.lengths))
        first = last
    return answer


def halve_rows(rows: Rows, lengths: NDArray[Any]) -> list[Rows]:
    """Two micro-batches with about half the tokens each, in the same order; a single sample is unchanged."""
    if rows.num_samples < 2:
        return [rows]
    tokens = np.cumsum(np.asarray(lengths)[rows.ids])
    if rows.num_rows > 1:
        middle = _middle(tokens[rows.starts[1:] - 1])
        own = np.asarray(lengths)[rows.ids].astype(np.int64)
        return [_rows_between(rows, 0, middle, own), _rows_between(rows, middle, rows.num_rows, own)]
    middle = _middle(tokens)
    parts = (slice(0, middle), slice(middle, None))
    return [packed_row(rows.ids[p], int(np.asarray(lengths)[rows.ids[p]].sum())) for p in parts]


def _middle(running: NDArray[Any]) -> int:
    """Size of the first half: at least one on either side."""
    return int(np.clip(np.searchsorted(running, running[-1] / 2) + 1, 1, len(running) - 1))


class _Taken:
    """How much of each limit a range of rows, or of samples in one row, uses."""

    def __init__(
        self, lengths: Ints, columns: Mapping[str, NDArray[Any]], limits: MicroBatchLimits, rows: Rows
    ) -> None:
        self.lengths, self.columns, self.limits, self.rows = lengths, columns, limits, rows

    def fits(self, first: int, last: int) -> bool:
        """True if rows first to last may share a micro-batch."""
        a, b = int(self.rows.starts[first]), int(self.rows.starts[last])
        if self.rows.layout == "packed":
            return self._within(a, b, (last - first) * self.rows.width, _pairs(self.lengths[a:b]))
        width = int(self.lengths[a:b].max(initial=0))
        return self._within(a, b, (b - a) * width, (b - a) * width * width)

    def fits_packed(self, a: int, b: int) -> bool:
        """True if samples a to b fit into one packed row with no empty cell."""
        return self._within(a, b, int(self.lengths[a:b].sum()), _pairs(self.lengths[a:b]))

    def check_alone(self) -> None:
        """Raise if a sample exceeds a limit by itself: splitting cannot help."""
        for i in range(len(self.lengths)):
            if not self.fits_packed(i, i + 1):
                raise PlanError(
                    "a sample exceeds the limit by itself, so its micro-batch cannot be split to fit",
                    seen=f"sample {self.rows.ids[i]} has {self.lengths[i]:,} tokens; {self.limits}",
                    do="raise the limit, or shorten that sample and plan again",
                )

    def _within(self, a: int, b: int, cells: int, pairs: int) -> bool:
        limits = self.limits
        held = [(cells, limits.cells), (pairs, limits.pairs), (b - a, limits.samples)]
        held += [(int(self.columns[name][a:b].sum()), limit) for name, limit in limits.costs.items()]
        return all(limit is None or value <= limit for value, limit in held)


def _pairs(lengths: Ints) -> int:
    return int(np.dot(lengths, lengths))


def _split_row(rows: Rows, row: int, taken: _Taken) -> list[Rows]:
    """Split one packed row into several, each as long as the limits allow."""
    answer: list[Rows] = []
    first, end = int(rows.starts[row]), int(rows.starts[row + 1])
    while first < end:
        last = first + 1
        while last < end and taken.fits_packed(first, last + 1):
            last += 1
        answer.append(packed_row(rows.ids[first:last], int(taken.lengths[first:last].sum())))
        first = last
    return answer


def _rows_between(rows: Rows, first: int, last: int, lengths: Ints) -> Rows:
    a, b = int(rows.starts[first]), int(rows.starts[last])
    if rows.layout == "padded":
        return padded_rows(rows.ids[a:b], int(lengths[a:b].max(initial=0)))
    return Rows(rows.ids[a:b], rows.starts[first : last + 1] - a, rows.width, "packed")
