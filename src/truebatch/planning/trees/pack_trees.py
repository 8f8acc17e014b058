"""Trees into packed rows.

trees -> rows of at most so many cells; a tree that is too large is cut between completions, its prompt copied
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from truebatch.planning.rows import Ints
from truebatch.planning.trees.prefix_trees import PrefixTrees


@dataclass(frozen=True, slots=True, eq=False)
class TreeRow:
    """Nodes laid end to end in one packed row."""

    nodes: Ints
    """In preorder."""
    completions: Ints
    """Whose tokens are in this row, in the order given by the caller."""

    def paths(self, trees: PrefixTrees) -> Iterator[tuple[int, Ints]]:
        """Every completion with the cells of this row from its root to its end."""
        lengths = trees.lengths[self.nodes]
        first = dict(zip(self.nodes.tolist(), (np.cumsum(lengths) - lengths).tolist(), strict=True))
        for one in self.completions.tolist():
            some = sorted(_path_of(trees, one))
            cells = [np.arange(first[node], first[node] + len(trees.tokens[node])) for node in some]
            yield one, np.concatenate(cells)


def plan_tree_rows(trees: PrefixTrees, cells: int) -> list[TreeRow]:
    """Rows of at most `cells` cells: whole trees, the largest first, each into the first row with room.

    A tree with more is cut between its completions, with a copy of their prompt in every part; a single path with more
    is a row of its own.
    """
    lengths, parts = trees.lengths, []
    owners = _completions_of_nodes(trees)
    for nodes in _whole_trees(trees.parents):
        parts += _cut_tree(trees, nodes, owners, lengths, cells)
    sizes = np.array([int(lengths[nodes].sum()) for nodes, _ in parts], dtype=np.int64)
    rows: list[tuple[int, list[int]]] = []
    for at in np.argsort(-sizes, kind="stable").tolist():
        fits = next((k for k, (used, _) in enumerate(rows) if used + sizes[at] <= cells), None)
        if fits is None:
            rows.append((int(sizes[at]), [at]))
        else:
            rows[fits] = (rows[fits][0] + int(sizes[at]), [*rows[fits][1], at])
    return [
        TreeRow(
            np.concatenate([parts[at][0] for at in some]), np.sort(np.concatenate([parts[at][1] for at in some]))
        )
        for _, some in rows
    ]  # fmt: skip


def _whole_trees(parents: Ints) -> list[Ints]:
    roots = np.flatnonzero(parents < 0)
    return np.split(np.arange(len(parents)), roots[1:]) if len(roots) else []


def _completions_of_nodes(trees: PrefixTrees) -> dict[int, list[int]]:
    owners: dict[int, list[int]] = {}
    for at, (leaf, prompt) in enumerate(zip(trees.leaf_of.tolist(), trees.prompt_of.tolist(), strict=True)):
        owners.setdefault(leaf if leaf >= 0 else prompt, []).append(at)
    return owners


def _cut_tree(
    trees: PrefixTrees, nodes: Ints, owners: dict[int, list[int]], lengths: Ints, cells: int
) -> list[tuple[Ints, Ints]]:
    """A tree as parts of (nodes, completions) that fit; usually one."""
    mine = [one for node in nodes.tolist() for one in owners.get(node, [])]
    if lengths[nodes].sum() <= cells or len(mine) <= 1:
        return [(nodes, np.array(mine, dtype=np.int64))]
    parts: list[tuple[set[int], list[int]]] = []
    for one in mine:
        path = _path_of(trees, one)
        grown = parts[-1][0] | path if parts else path
        if parts and lengths[sorted(grown)].sum() <= cells:
            parts[-1] = (grown, [*parts[-1][1], one])
        else:
            parts.append((path, [one]))
    return [(np.array(sorted(some), dtype=np.int64), np.array(ones, dtype=np.int64)) for some, ones in parts]


def _path_of(trees: PrefixTrees, completion: int) -> set[int]:
    at = int(trees.leaf_of[completion])
    at = int(trees.prompt_of[completion]) if at < 0 else at
    path = set()
    while at >= 0:
        path.add(at)
        at = int(trees.parents[at])
    return path
