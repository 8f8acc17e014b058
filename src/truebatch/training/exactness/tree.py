"""Sums in one fixed binary tree: its shape follows from the number of leaves alone, not from who adds what, or when.

leaves, in any order, on any rank -> sums of pairs, of pairs of pairs, ... -> one sum, bit for bit the same
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]
"""Level and place: node (k, i) holds the leaves from i * 2**k up to (i + 1) * 2**k, as far as there are any."""


class TreeSum(Generic[T]):
    """A sum of `num_leaves` values. A part is added to its neighbour as soon as both are there, so few wait.

    Leaves that come in order leave at most one part waiting per level: log2(num_leaves) + 1 of them.

    >>> tree = TreeSum(3, lambda left, right: f"({left}+{right})")
    >>> for leaf in (2, 0, 1):
    ...     tree.add((0, leaf), "abc"[leaf])
    >>> tree.parts
    {(2, 0): '((a+b)+c)'}
    """

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        self.num_leaves, self._add = num_leaves, add
        self.parts: dict[Node, T] = {}
        """What waits for its neighbour; the whole sum under one node once every leaf is there."""

    def add(self, node: Node, value: T) -> None:
        """Put a leaf, or a part that was summed elsewhere, into its place."""
        level, place = node
        while self._number(level) > 1:
            neighbour = (level, place ^ 1)
            if neighbour[1] < self._number(level):
                if neighbour not in self.parts:
                    break
                other = self.parts.pop(neighbour)
                value = self._add(other, value) if place & 1 else self._add(value, other)
            level, place = level + 1, place >> 1
        self.parts[level, place] = value

    def _number(self, level: int) -> int:
        """Nodes of a level."""
        return (self.num_leaves + (1 << level) - 1) >> level


def parts_of(first: int, end: int, num_leaves: int) -> list[Node]:
    """The parts that are left of the leaves `first` to `end`, in order: what one rank has to say to the others.

    >>> parts_of(0, 6, 16), parts_of(6, 12, 16), parts_of(0, 8, 16)
    ([(1, 2), (2, 0)], [(1, 3), (2, 2)], [(3, 0)])
    """
    tree: TreeSum[None] = TreeSum(num_leaves, lambda _left, _right: None)
    for leaf in range(first, end):
        tree.add((0, leaf), None)
    return sorted(tree.parts)
