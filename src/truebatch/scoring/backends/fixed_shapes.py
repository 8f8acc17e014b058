"""Fixed shapes: at level `shape` every forward pass of one width has the same rows and cells, whatever its samples.

A sample's width follows from its own length and the number of rows from the width, so that neither neighbours nor
order nor the number of workers can change a bit of its result.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_WIDTH = 64
MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of a run; a function of the budget alone."""

    cells: int
    """Maximum number of cells in a forward pass; there are always at least two rows."""

    def width(self, length: int) -> int:
        """The row width for a prompt of this length, always larger than the prompt.

        Without padding some models take another attention path, so that neighbours would change the result.
        """
        unit = LEAST_WIDTH if length < 4 * LEAST_WIDTH else 1 << (length.bit_length() - 3)
        return (length // unit + 1) * unit

    def rows(self, width: int) -> int:
        """Rows of a forward pass of this width; one of them is a filler that keeps the width."""
        return max(2, min(MOST_ROWS, self.cells // width))
