"""The samples of one micro-batch and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Layout = Literal["padded", "packed"]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which samples share a forward pass, and the row of each.

    Row b holds the samples `ids[starts[b]:starts[b + 1]]`, end to end. An empty micro-batch (a rank
    without samples in a short step) has no rows.

    >>> import numpy as np
    >>> from truebatch import Rows
    >>> Rows(ids=np.array([4, 0, 7]), starts=np.array([0, 2, 3]), width=9, layout="packed").num_rows
    2
    """

    ids: Ints
    """[N] sample ids, row by row."""
    starts: Ints
    """[B + 1] start of each row in `ids`."""
    width: int
    """Cells per row, including padding."""
    layout: Layout

    @property
    def num_rows(self) -> int:
        """Number of rows in the forward pass."""
        return len(self.starts) - 1

    @property
    def num_samples(self) -> int:
        """Number of samples in the forward pass."""
        return len(self.ids)

    @property
    def cells(self) -> int:
        """Number of cells in the forward pass, including padding."""
        return self.num_rows * self.width

    def row(self, index: int) -> Ints:
        """The sample ids of one row, in order."""
        return self.ids[self.starts[index] : self.starts[index + 1]]


def padded_rows(ids: Ints, width: int) -> Rows:
    """One sample per row, every row `width` cells wide.

    >>> import numpy as np
    >>> from truebatch.planning.rows import padded_rows
    >>> padded_rows(np.arange(2), 3).num_rows
    2
    """
    ids = np.asarray(ids, dtype=np.int64)
    return Rows(ids, np.arange(len(ids) + 1, dtype=np.int64), int(width), "padded")


def packed_row(ids: Ints, width: int) -> Rows:
    """All samples end to end in a single row of `width` cells (no row at all for no samples).

    >>> import numpy as np
    >>> from truebatch.planning.rows import packed_row
    >>> packed_row(np.arange(2), 4).num_rows
    1
    """
    ids = np.asarray(ids, dtype=np.int64)
    starts = np.array([0, len(ids)] if len(ids) else [0], dtype=np.int64)
    return Rows(ids, starts, int(width), "packed")


def longest_first(rows: Rows, lengths: Ints) -> Rows:
    """The same rows with the samples of each sorted longest first, which suits attention kernels.

    `lengths` [N] are those of `rows.ids`. Samples of equal length keep their order.
    """
    row_of = np.repeat(np.arange(rows.num_rows), np.diff(rows.starts))
    order = np.lexsort((-np.asarray(lengths, dtype=np.int64), row_of))
    return Rows(rows.ids[order], rows.starts, rows.width, rows.layout)


def row_width(tokens: Any, widths: Sequence[int]) -> Any:
    """The narrowest width for each number of tokens; the number itself without widths, and for no tokens.

    >>> row_width(np.array([0, 700, 4000]), (4096, 2048, 1024)).tolist()
    [0, 1024, 4096]
    """
    if not len(widths):
        return tokens
    rising = np.array(widths[::-1], dtype=np.int64)
    found = rising[np.minimum(np.searchsorted(rising, tokens), len(rising) - 1)]
    return np.where(np.asarray(tokens) > 0, found, 0)
