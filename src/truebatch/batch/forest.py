"""Trees of segments in packed rows: a shared prompt once, what follows it as children, and theirs.

parents of segments -> spans by depth: the cells of a segment, and all cells below it -> attention, positions

Segments are in preorder, so what is below a segment is one span behind it. A cell sees its own segment up to itself and
all cells of its ancestors: what it would see if its path were a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from truebatch.errors import BatchError

Span = tuple[int, int]
"""First cell, and the one after the last."""


@dataclass(frozen=True, slots=True, eq=False)
class ForestLevel:
    """The segments of one depth that have children: keys for everything below them, in one variable-length call."""

    keys: tuple[Span, ...]
    queries: tuple[Span, ...]
    """What is below each of them."""
    key_cells: Tensor
    """[nk] int64: the same cells, end to end."""
    query_cells: Tensor
    """[nq] int64."""
    key_starts: Tensor
    """[spans + 1] int32: where each span begins among them."""
    query_starts: Tensor
    """[spans + 1] int32."""

    @property
    def longest(self) -> tuple[int, int]:
        """Of the spans of queries, and of keys."""
        return max(b - a for a, b in self.queries), max(b - a for a, b in self.keys)

    def to(self, device: torch.device | str, *, non_blocking: bool) -> ForestLevel:
        """The same with its tensors on `device`."""
        names = ("key_cells", "query_cells", "key_starts", "query_starts")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Which segment of a table continues which."""

    parents: tuple[int, ...]
    """For each segment, the number of the one it continues; -1 where a path begins."""
    before: Tensor
    """[S] int64: cells of all ancestors, the position of a segment's first cell."""
    levels: tuple[ForestLevel, ...]
    """From the roots down."""
    longest_path: int

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Forest:
        """The same with its tensors on `device`."""
        levels = tuple(level.to(device, non_blocking=non_blocking) for level in self.levels)
        return replace(self, before=self.before.to(device, non_blocking=non_blocking), levels=levels)


def build_forest(lengths: Sequence[int], parents: Sequence[int]) -> Forest:
    """The forest of consecutive segments of these lengths, in preorder; every segment has a cell at least."""
    _check_parents(lengths, parents)
    before, ends = _cells_before(lengths, parents), _ends_of_subtrees(lengths, parents)
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    by_depth: dict[int, list[int]] = {}
    depth = [0] * len(lengths)
    for at, parent in enumerate(parents):
        depth[at] = 0 if parent < 0 else depth[parent] + 1
        if ends[at] > starts[at + 1]:
            by_depth.setdefault(depth[at], []).append(at)
    levels = tuple(
        _level(
            [(int(starts[at]), int(starts[at + 1])) for at in some], [(int(starts[at + 1]), ends[at]) for at in some]
        )
        for _, some in sorted(by_depth.items())
    )
    longest = max((first + length for first, length in zip(before, lengths, strict=True)), default=0)
    return Forest(tuple(parents), torch.tensor(before, dtype=torch.int64), levels, longest)


def _level(keys: list[Span], queries: list[Span]) -> ForestLevel:
    tensors = []
    for spans in (keys, queries):
        cells = np.concatenate([np.arange(a, b) for a, b in spans])
        starts = np.cumsum([0, *(b - a for a, b in spans)], dtype=np.int32)
        tensors.append((torch.from_numpy(cells.astype(np.int64)), torch.from_numpy(starts)))
    (key_cells, key_starts), (query_cells, query_starts) = tensors
    return ForestLevel(tuple(keys), tuple(queries), key_cells, query_cells, key_starts, query_starts)


def _cells_before(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    before: list[int] = []
    for parent in parents:
        before.append(0 if parent < 0 else before[parent] + lengths[parent])
    return before


def _ends_of_subtrees(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    ends: list[int] = np.cumsum(lengths, dtype=np.int64).tolist()
    for at in range(len(parents) - 1, -1, -1):
        if parents[at] >= 0:
            ends[parents[at]] = max(ends[parents[at]], ends[at])
    return ends


def _check_parents(lengths: Sequence[int], parents: Sequence[int]) -> None:
    if len(lengths) != len(parents) or min(lengths, default=1) < 1:
        raise BatchError(
            "every segment of a forest has a cell and says what it continues",
            seen=f"{len(lengths)} lengths from {min(lengths, default=0)} on, {len(parents)} parents",
            do="leave empty segments out, and give -1 for a segment that begins a path",
        )
    open_path = [-1]
    for at, parent in enumerate(parents):
        while open_path[-1] != parent and open_path[-1] != -1:
            open_path.pop()
        if open_path[-1] != parent:
            raise BatchError(
                "the segments of a forest are in preorder: each after its parent, with nothing else between them",
                seen=f"segment {at} continues segment {parent}; parents {list(parents)[:12]}",
                do="order them so that everything below a segment follows it",
            )
        open_path.append(at)


def ancestors_of(parents: Sequence[int], at: int) -> list[int]:
    """From the root down to `at` itself."""
    path = [at]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def sees_segment(parents: Sequence[int]) -> Tensor:
    """[S, S] bool: True where the second segment is the first one or an ancestor of it."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for at, parent in enumerate(parents):
        if parent >= 0:
            sees[at] |= sees[parent]
    return sees


def join_forests(forests: Sequence[Forest | None], lengths: Sequence[Sequence[int]]) -> Forest | None:
    """The forest of several tables that are laid end to end; None where none has one."""
    if all(forest is None for forest in forests):
        return None
    starts = np.cumsum([0, *map(len, lengths)]).tolist()
    parents: list[int] = []
    for forest, some, (first, _) in zip(forests, lengths, pairwise(starts), strict=True):
        own = [-1] * len(some) if forest is None else forest.parents
        parents += [parent + first if parent >= 0 else -1 for parent in own]
    return build_forest([length for some in lengths for length in some], parents)
