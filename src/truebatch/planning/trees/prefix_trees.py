"""Prompts and completions as trees: cells that several completions begin with count once.

prompts, completions -> equal prompts once, on request all that prompts begin with in common -> nodes in preorder
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from truebatch.errors import BatchError
from truebatch.planning.rows import Ints

Tokens = Sequence[int]
Share = Literal["prompts", "beginnings", "nothing"]
"""prompts: equal prompts are laid out once. beginnings: so is what different prompts begin with. nothing: copies."""

LEAST_SHARED = 16
"""Tokens that prompts must have in common at least, to be worth a segment of its own."""


class PrefixTrees(NamedTuple):
    """Nodes in preorder: each holds tokens and continues another node, or begins a path."""

    tokens: list[Tokens]
    parents: Ints
    """[nodes] -1 for a root."""
    prompt_of: Ints
    """[N] the node that a completion continues."""
    leaf_of: Ints
    """[N] the node of a completion's tokens; -1 for an empty completion."""

    @property
    def lengths(self) -> Ints:
        """Cells of every node."""
        return np.array([len(some) for some in self.tokens], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TreeCells:
    """What trees cost, and what the same samples cost with a copy of its prompt for each."""

    cells: int
    copied_cells: int
    pairs: int
    """Query-key positions that are computed."""
    copied_pairs: int


def grow_trees(
    prompts: Sequence[Tokens], completions: Sequence[Tokens], *, share: Share = "prompts", least: int = LEAST_SHARED
) -> PrefixTrees:
    """The trees of completions [N], each under its prompt [N], in the order in which prompts appear.

    `least`: tokens that different prompts must have in common to share them.
    """
    _check(prompts, completions)
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, prompt in enumerate(prompts):
        groups.setdefault((*prompt, *((-1, at) if share == "nothing" else ())), []).append(at)
    builder = _Builder(prompts, completions, least)
    members = list(groups.values())
    if share == "beginnings":
        builder.add_common(members, 0, -1)
    else:
        for some in members:
            builder.add_prompt(some, 0, -1)
    return PrefixTrees(builder.tokens, np.array(builder.parents, dtype=np.int64), builder.prompt_of, builder.leaf_of)


class _Builder:
    def __init__(self, prompts: Sequence[Tokens], completions: Sequence[Tokens], least: int) -> None:
        self.prompts, self.completions, self.least = prompts, completions, least
        self.tokens: list[Tokens] = []
        self.parents: list[int] = []
        self.prompt_of = np.full(len(prompts), -1, dtype=np.int64)
        self.leaf_of = np.full(len(prompts), -1, dtype=np.int64)

    def node(self, tokens: Tokens, parent: int) -> int:
        if not len(tokens):
            return parent
        self.tokens.append(tokens)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def add_prompt(self, some: list[int], begin: int, parent: int) -> None:
        """The rest of a prompt from `begin` on, and its completions below."""
        at = self.node(self.prompts[some[0]][begin:], parent)
        for one in some:
            self.prompt_of[one] = at
            below = self.node(self.completions[one], at)
            self.leaf_of[one] = below if below != at else -1

    def add_common(self, members: list[list[int]], begin: int, parent: int) -> None:
        """Groups of equal prompts that agree up to `begin`: what several of them go on with becomes a node."""
        for some in self._alike(members, begin):
            if len(some) == 1:
                self.add_prompt(some[0], begin, parent)
                continue
            end = self._common_end(some, begin)
            self.add_common(some, end, self.node(self.prompts[some[0][0]][begin:end], parent))

    def _alike(self, members: list[list[int]], begin: int) -> list[list[list[int]]]:
        """By the next `least` tokens; what has fewer stays alone."""
        found: dict[tuple[int, ...], list[list[int]]] = {}
        for at, some in enumerate(members):
            key = tuple(self.prompts[some[0]][begin : begin + self.least])
            found.setdefault(key if len(key) == self.least else (-1, at), []).append(some)
        return list(found.values())

    def _common_end(self, members: list[list[int]], begin: int) -> int:
        first = self.prompts[members[0][0]]
        end = min(len(self.prompts[some[0]]) for some in members)
        for some in members[1:]:
            other = self.prompts[some[0]]
            end = next((at for at in range(begin, end) if first[at] != other[at]), end)
        return end


def tree_cells(trees: PrefixTrees) -> TreeCells:
    """Cells and pairs with shared nodes, and with copies."""
    lengths, before = trees.lengths, np.zeros(len(trees.tokens), dtype=np.int64)
    for at, parent in enumerate(trees.parents.tolist()):
        before[at] = 0 if parent < 0 else before[parent] + lengths[parent]
    ends = before + lengths
    own = lengths * before + lengths * (lengths + 1) // 2
    leaves = np.where(trees.leaf_of < 0, trees.prompt_of, trees.leaf_of)
    paths = ends[leaves]
    return TreeCells(int(lengths.sum()), int(paths.sum()), int(own.sum()), int((paths * (paths + 1) // 2).sum()))


def _check(prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> None:
    if len(prompts) != len(completions):
        raise BatchError(
            "every completion needs its prompt",
            seen=f"{len(prompts)} prompts, {len(completions)} completions",
            do="give two lists of the same length; a prompt with several completions stands there once for each",
        )
    if not prompts:
        raise BatchError("there are no completions", seen="empty lists", do="give at least one prompt and completion")
    empty = next((at for at, prompt in enumerate(prompts) if not len(prompt)), None)
    if empty is not None:
        raise BatchError(
            f"prompt {empty} is empty, so nothing predicts the first token of its completion",
            seen="no tokens",
            do="begin it with the tokenizer's first token (bos)",
        )
