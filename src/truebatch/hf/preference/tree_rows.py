"""Rows of prompts and completions as a model reads them, and which cells say what.

PrefixTrees -> packed rows of trees | padded rows of paths -> input ids, segments, the cells that predict each token
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.batch.segments import Segments, cell_positions, forest_segments, packed_segments, padded_segments
from truebatch.hf.attention.packed import packed_inputs
from truebatch.hf.attention.rope import begin_call
from truebatch.hf.heads.heads import ModelHead, packed_attention_on
from truebatch.hf.preference.sharing import tree_inputs
from truebatch.planning.trees.pack_trees import TreeRow
from truebatch.planning.trees.prefix_trees import PrefixTrees, Tokens


@dataclass(frozen=True, slots=True, eq=False)
class CompletionRows:
    """Rows of one forward pass, and where its completions are read."""

    input_ids: Tensor
    """[B, T]"""
    segments: Segments
    completions: tuple[int, ...]
    """By the caller's numbers."""
    counts: tuple[int, ...]
    """Tokens of each."""
    cells: Tensor
    """[m] flattened cells, each of which predicts a token of a completion, completion after completion."""
    labels: Tensor
    """[m] these tokens."""
    last: Tensor
    """[n] the last cell of each completion."""
    paths: tuple[int, ...]
    """Cells of each prompt with its completion."""

    @property
    def is_packed(self) -> bool:
        """Whether rows hold more than one sample each."""
        return self.segments.layout == "packed"

    def to(self, device: torch.device) -> CompletionRows:
        """The same rows with their tensors on `device`."""
        return CompletionRows(
            self.input_ids.to(device), self.segments.to(device), self.completions, self.counts,
            self.cells.to(device), self.labels.to(device), self.last.to(device), self.paths,
        )  # fmt: skip


class _Reading:
    """Where the completions of some rows are read, collected one after the other."""

    def __init__(self) -> None:
        self.cells: list[int] = []
        self.labels: list[int] = []
        self.last: list[int] = []
        self.counts: list[int] = []
        self.paths: list[int] = []

    def add(self, own: Tokens, *, prompt_end: int, begin: int, path: int) -> None:
        """A completion whose tokens are at `begin`, after a prompt that ends before `prompt_end`."""
        if len(own):
            self.cells += [prompt_end - 1, *range(begin, begin + len(own) - 1)]
        self.labels += own
        self.last.append((begin + len(own) if len(own) else prompt_end) - 1)
        self.counts.append(len(own))
        self.paths.append(path)

    def rows(self, tokens: Sequence[Tokens], segments: Segments, row: TreeRow) -> CompletionRows:
        ids = torch.from_numpy(np.concatenate([np.asarray(some, dtype=np.int64) for some in tokens]))
        cells, labels, last = (torch.tensor(part, dtype=torch.int64) for part in (self.cells, self.labels, self.last))
        return CompletionRows(
            input_ids=ids.view(segments.shape), segments=segments, completions=tuple(row.completions.tolist()),
            counts=tuple(self.counts), cells=cells, labels=labels, last=last, paths=tuple(self.paths),
        )  # fmt: skip


def packed_tree_row(trees: PrefixTrees, row: TreeRow) -> CompletionRows:
    """The trees of a row in one packed row."""
    nodes = row.nodes.tolist()
    at = {node: k for k, node in enumerate(nodes)}
    tokens = [trees.tokens[node] for node in nodes]
    parents = [at.get(int(trees.parents[node]), -1) for node in nodes]
    ends: list[int] = np.cumsum([len(some) for some in tokens]).tolist()
    before, read = _cells_to(parents, tokens), _Reading()
    for one in row.completions.tolist():
        prompt, leaf = at[int(trees.prompt_of[one])], at.get(int(trees.leaf_of[one]), -1)
        own: Tokens = tokens[leaf] if leaf >= 0 else ()
        path = before[leaf if leaf >= 0 else prompt]
        read.add(own, prompt_end=ends[prompt], begin=ends[leaf] - len(own) if leaf >= 0 else 0, path=path)
    return read.rows(tokens, _tree_segments(tokens, parents), row)


def padded_rows(prompts: Sequence[Tokens], completions: Sequence[Tokens], row: TreeRow) -> CompletionRows:
    """Each prompt with its completion in a row of its own."""
    some, read = row.completions.tolist(), _Reading()
    width = max(len(prompts[one]) + len(completions[one]) for one in some)
    for at, one in enumerate(some):
        begin = at * width + len(prompts[one])
        read.add(completions[one], prompt_end=begin, begin=begin, path=len(prompts[one]) + len(completions[one]))
    tokens = [
        [*prompts[one], *completions[one], *[0] * (width - path)] for one, path in zip(some, read.paths, strict=True)
    ]
    return read.rows(tokens, padded_segments(read.paths, width), row)


def _tree_segments(tokens: Sequence[Tokens], parents: Sequence[int]) -> Segments:
    """One segment for a node and its only child: a prompt with one completion is a sample like any other."""
    children = [0] * len(tokens)
    for parent in parents:
        if parent >= 0:
            children[parent] += 1
    lengths: list[int] = []
    above: list[int] = []
    owner: list[int] = []
    for some, parent in zip(tokens, parents, strict=True):
        if parent >= 0 and children[parent] == 1:
            lengths[owner[parent]] += len(some)
            owner.append(owner[parent])
            continue
        owner.append(len(lengths))
        lengths.append(len(some))
        above.append(owner[parent] if parent >= 0 else -1)
    return packed_segments(lengths) if max(above) < 0 else forest_segments(lengths, above)


def _cells_to(parents: Sequence[int], tokens: Sequence[Tokens]) -> list[int]:
    ends: list[int] = []
    for parent, some in zip(parents, tokens, strict=True):
        ends.append(len(some) + (ends[parent] if parent >= 0 else 0))
    return ends


def call_inputs(head: ModelHead, model: nn.Module, rows: CompletionRows) -> dict[str, Any]:
    """Arguments of the model for these rows."""
    begin_call(model, rows.paths)
    positions = cell_positions(rows.segments)
    found = tree_inputs(head, model, rows.input_ids, positions)
    if not rows.is_packed:
        return found | {"attention_mask": rows.segments.is_real.long()}
    table = packed_inputs(rows.segments, positions=positions)
    return found | {name: value for name, value in table.items() if name != "position_ids"}


@contextmanager
def attending(head: ModelHead, model: nn.Module, rows: CompletionRows) -> Iterator[None]:
    """While open, the attention of `model` keeps these rows' paths apart."""
    with packed_attention_on(head, model, "packed" if rows.is_packed else "padded"):
        yield
