"""What the training benchmark runs on: samples of a length distribution, and the micro-batches of each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from truebatch.hf.heads import Head
from truebatch.hf.shapes import Shape
from truebatch.planning.distributions import Distribution, example_lengths
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints, Rows, longest_first, packed_row, padded_rows
from truebatch.planning.settings import PlanConfig
from truebatch.tensors.collating import collate
from truebatch.tensors.microbatch import MicroBatch

GROUPED_OVER = 50
"""Hugging Face's `group_by_length` sorts this many micro-batches at a time."""
MASKED_SHARE = 0.15
IGNORE = -100


@dataclass(frozen=True, eq=False)
class Work:
    """The samples of one distribution, in random order, and how each way cuts them into micro-batches."""

    head: Head
    lengths: Ints
    samples: Sequence[dict[str, Ints]]
    cells: int
    """Cells of a micro-batch of ours: a packed row, or the token budget of padded rows."""
    slots: int
    """Entries of the segment table of packed rows."""

    @property
    def is_masked(self) -> bool:
        """True for a masked language model: few cells have a label."""
        return self.head.kind.name == "masked_lm"

    @property
    def labelled(self) -> float:
        """The share of the tokens that have a label, as it was drawn; the last one of a causal sample counts as one."""
        return MASKED_SHARE if self.is_masked else 1.0

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def pairs_per_token(self) -> float:
        return float((self.lengths.astype(np.float64) ** 2).sum() / self.lengths.sum())

    @property
    def uniform_length(self) -> int:
        """The length at which even samples cost as many pairs a token as these, to a multiple of eight."""
        return max(8 * round(self.pairs_per_token / 8), 8)

    def chunks(self, number: int, *, by_length: bool) -> list[MicroBatch]:
        """Micro-batches of `number` samples as Hugging Face makes them: at random, or of similar length.

        The first of them hold the samples of the first packed rows, so that few of either have the same work.
        """
        order = np.concatenate([rows.ids for rows in self.rows])
        if by_length:
            window = number * GROUPED_OVER
            parts = [order[i : i + window] for i in range(0, len(order), window)]
            order = np.concatenate([part[np.argsort(-self.lengths[part], kind="stable")] for part in parts])
        cut = [order[i : i + number] for i in range(0, len(order) - number + 1, number)]
        cut = [cut[i] for i in np.random.default_rng(1).permutation(len(cut))] if by_length else cut
        return [self.collate(padded_rows(ids, int(self.lengths[ids].max()))) for ids in cut[:64]]

    def budgeted(self) -> list[MicroBatch]:
        """Padded micro-batches under the token budget."""
        plan = build_plan(self.lengths, PlanConfig(cells=self.cells, micro_batches_per_step=1))
        return [self.collate(plan.step(i)[0][0]) for i in range(min(plan.num_steps, 64))]

    @cached_property
    def rows(self) -> list[Rows]:
        config = PlanConfig(layout="packed", cells=self.cells, rows_per_step=1)
        plan = build_plan(self.lengths, config)
        found = [plan.step(i)[0][0] for i in range(min(plan.num_steps, 64))]
        tokens = [int(self.lengths[rows.ids].sum()) for rows in found]
        return [rows for rows, n in zip(found, tokens, strict=True) if n > 0.9 * self.cells] or found

    def packed(self, *, is_static: bool) -> list[MicroBatch]:
        """Packed rows of `cells` cells as the loader lays them; with a segment table of one shape for all if static."""
        rows = [longest_first(r, self.lengths[r.ids]) for r in self.rows]
        return [self.collate(r, slots=self.slots if is_static else None) for r in rows]

    def flattened(self) -> list[MicroBatch]:
        """The same rows without padding at their end, as Hugging Face's flattening collator lays them."""
        return [self.collate(packed_row(r.ids, int(self.lengths[r.ids].sum()))) for r in self.rows]

    def collate(self, rows: Rows, slots: int | None = None) -> MicroBatch:
        return collate([self.samples[i] for i in rows.ids.tolist()], rows, self.head.fields, slots=slots)

    def even_packed(self, *, is_static: bool) -> list[MicroBatch]:
        """One packed row of even samples, through the same kernel as ours: what is lost is raggedness alone."""
        length = min(self.uniform_length, self.cells)
        number = max(self.cells // length, 1)
        longest = max(self.samples, key=lambda sample: len(sample["input_ids"]))
        sample = {name: np.resize(values, length) for name, values in longest.items()}
        rows = packed_row(np.arange(number), number * length)
        return [collate([sample] * number, rows, self.head.fields, slots=self.slots if is_static else None)]

    def uniform(self, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L] tokens and labels, and the flattened cells with a label: as many rows of the uniform length as fit."""
        length = min(self.uniform_length, self.cells)
        ids = torch.randint(0, vocabulary, (max(self.cells // length, 1), length))
        if self.is_masked:
            labels = torch.where(torch.rand(ids.shape) < MASKED_SHARE, ids, IGNORE)
        else:
            labels = torch.roll(ids, -1, 1)
            labels[:, -1] = IGNORE
        return ids, labels, torch.nonzero(labels.flatten() != IGNORE)[:, 0]


def make_work(
    head: Head, shape: Shape, name: Distribution, *, num: int, longest: int, cells: int, slots: int, seed: int = 0
) -> Work:
    """Random tokens of the distribution's lengths, none over `longest`."""
    lengths = np.minimum(example_lengths(name, num, seed=seed), longest)
    random = np.random.default_rng(seed + 1)
    samples: list[dict[str, Ints]] = []
    for length in lengths.tolist():
        ids = random.integers(0, shape.sizes["vocab_size"], length)
        hidden = random.random(length) < MASKED_SHARE
        labels = np.where(hidden, ids, IGNORE) if shape.masked else ids
        samples.append({"input_ids": ids, "labels": labels})
    return Work(head, lengths, samples, cells, slots)
