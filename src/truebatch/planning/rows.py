"""The samples of one micro-batch and the rows they lie in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Layout = Literal["padded", "packed"]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which samples share a forward pass, and in which row each lies.

    Row b holds the samples `ids[starts[b]:starts[b + 1]]`, end to end. An empty micro-batch (a rank
    with nothing to do in a short step) has no rows.

    >>> import numpy as np
    >>> from truebatch import Rows
    >>> Rows(ids=np.array([4, 0, 7]), starts=np.array([0, 2, 3]), width=9, layout="packed").num_rows
    2
    """

    ids: Ints
    """[N] sample ids in row order."""
    starts: Ints
    """[B + 1] where each row begins in `ids`."""
    width: int
    """Cells a row has, padding included."""
    layout: Layout

    @property
    def num_rows(self) -> int:
        """How many rows the forward pass has."""
        return len(self.starts) - 1

    @property
    def num_samples(self) -> int:
        """How many samples the forward pass has."""
        return len(self.ids)

    @property
    def cells(self) -> int:
        """Positions of the forward pass, padding included."""
        return self.num_rows * self.width

    def row(self, index: int) -> Ints:
        """The sample ids of one row, in order."""
        return self.ids[self.starts[index] : self.starts[index + 1]]


def padded_rows(ids: Ints, width: int) -> Rows:
    """One sample a row, every row `width` cells wide."""
    ids = np.asarray(ids, dtype=np.int64)
    return Rows(ids, np.arange(len(ids) + 1, dtype=np.int64), int(width), "padded")


def packed_row(ids: Ints, width: int) -> Rows:
    """All samples end to end in a single row of `width` cells (no row at all for no samples)."""
    ids = np.asarray(ids, dtype=np.int64)
    starts = np.array([0, len(ids)] if len(ids) else [0], dtype=np.int64)
    return Rows(ids, starts, int(width), "packed")


def longest_first(rows: Rows, lengths: Ints) -> Rows:
    """The same rows with the samples of each in order of falling length, as attention kernels like them.

    `lengths` [N] are those of `rows.ids`. Samples of equal length stay in their order.
    """
    row_of = np.repeat(np.arange(rows.num_rows), np.diff(rows.starts))
    order = np.lexsort((-np.asarray(lengths, dtype=np.int64), row_of))
    return Rows(rows.ids[order], rows.starts, rows.width, rows.layout)
