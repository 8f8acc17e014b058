"""What the training benchmark runs on: samples of a length distribution, and the micro-batches of each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.model_shapes import Shape
from truebatch.batch.collate import collate
from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.heads.heads import ModelHead
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints, Rows, longest_first, packed_row, padded_rows
from truebatch.testing.length_distributions import Distribution, example_lengths

Floats = npt.NDArray[np.float64]
DRAWS, EXCHANGES = 20_000, 2_000
"""How long typical micro-batches are looked for: a tenth of a second."""
GROUPED_OVER = 50
"""Hugging Face's `group_by_length` sorts this many micro-batches at a time."""
MASKED_SHARE = 0.15
IGNORE = -100


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """One micro-batch of an epoch before it is made."""

    lengths: Ints
    """Of its samples."""
    cells: int
    """With padding."""
    make: Callable[[], Any]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def pairs(self) -> int:
        """Of a query and a key in the same sample."""
        return int((self.lengths**2).sum())


def pairs_per_token(parts: Sequence[Part]) -> float:
    """Work of attention for a token, which the lengths decide."""
    return sum(part.pairs for part in parts) / max(sum(part.tokens for part in parts), 1)


def new_share(parts: Sequence[Part]) -> float:
    """Of the micro-batches of an epoch, those with a number of cells that none before them had."""
    return len({part.cells for part in parts}) / len(parts)


def typical_parts(parts: Sequence[Part], number: int) -> tuple[list[Part], list[Part]]:
    """`number` parts, and as many others if there are so many, that are each like the whole epoch; those more like it first.

    Like it in what decides the time of a token: parts, cells and pairs for each. The first few parts of ragged data may
    have a third more pairs than the epoch, or a third fewer, and a ratio of two ways would then be one of two works. The
    best of many random choices is bettered by exchanging two parts at a time; the seed is fixed.
    """
    if len(parts) <= number:
        return list(parts), []
    costs = np.array([[part.tokens, 1, part.cells, part.pairs] for part in parts], dtype=np.float64)
    whole = costs[:, 1:].sum(0) / costs[:, 0].sum()
    wanted = 2 * number if len(parts) >= 2 * number else number
    random = np.random.default_rng(0)
    drawn = random.integers(len(parts), size=(DRAWS, wanted))
    drawn = drawn[(np.diff(np.sort(drawn, axis=1)) > 0).all(1)]  # none twice
    if len(drawn) == 0:
        drawn = random.permutation(len(parts))[None, :wanted]
    best = drawn[_distances(costs[drawn], number, whole).sum(1).argmin()]
    order = np.concatenate([best, np.setdiff1d(np.arange(len(parts)), best)])
    nearest = _distances(costs[order[None, :wanted]], number, whole).sum()
    for at, other in zip(
        random.integers(wanted, size=EXCHANGES), random.integers(len(parts), size=EXCHANGES), strict=True
    ):
        changed = order.copy()
        changed[[at, other]] = order[[other, at]]
        far = _distances(costs[changed[None, :wanted]], number, whole).sum()
        if far < nearest:
            order, nearest = changed, far
    timed, others = order[:number], order[number : 2 * number]
    if len(others) == number and np.diff(_distances(costs[order[None, :wanted]], number, whole)[0]) < 0:
        timed, others = others, timed
    return [parts[i] for i in timed], [parts[i] for i in others]


def _distances(costs: Floats, number: int, whole: Floats) -> Floats:
    """[K, parts, costs] of K choices -> [K, groups]: how far each is from the whole, squared logarithms of ratios added up."""
    sums = costs.reshape(len(costs), -1, number, costs.shape[2]).sum(2)
    found: Floats = np.square(np.log(sums[..., 1:] / sums[..., :1] / whole)).sum(2)
    return found


@dataclass(frozen=True, eq=False)
class Work:
    """The samples of one distribution, in random order, and how each way cuts them into micro-batches."""

    head: ModelHead
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

    def chunks(self, number: int, *, by_length: bool) -> list[Part]:
        """Micro-batches of `number` samples as Hugging Face makes them: at random, or of similar length."""
        order = np.arange(len(self.lengths))
        if by_length:
            window = number * GROUPED_OVER
            parts = [order[i : i + window] for i in range(0, len(order), window)]
            order = np.concatenate([part[np.argsort(-self.lengths[part], kind="stable")] for part in parts])
        cut = [order[i : i + number] for i in range(0, len(order) - number + 1, number)]
        cut = [cut[i] for i in np.random.default_rng(1).permutation(len(cut))] if by_length else cut
        return [self.part(padded_rows(ids, int(self.lengths[ids].max()))) for ids in cut]

    def budgeted(self) -> list[Part]:
        """Padded micro-batches under the token budget."""
        plan = build_plan(self.lengths, PlanConfig(cells=self.cells, micro_batches_per_step=1))
        return [self.part(plan.step(i)[0][0]) for i in range(plan.num_steps)]

    @cached_property
    def rows(self) -> list[Rows]:
        config = PlanConfig(layout="packed", cells=self.cells, rows_per_step=1)
        plan = build_plan(self.lengths, config)
        return [plan.step(i)[0][0] for i in range(plan.num_steps)]

    def packed(self, *, is_static: bool) -> list[Part]:
        """Packed rows of `cells` cells as the loader lays them; with a segment table of one shape for all if static."""
        rows = [longest_first(r, self.lengths[r.ids]) for r in self.rows]
        return [self.part(r, slots=self.slots if is_static else None) for r in rows]

    def flattened(self) -> list[Part]:
        """The same rows without padding at their end, as Hugging Face's flattening collator lays them."""
        return [self.part(packed_row(r.ids, int(self.lengths[r.ids].sum()))) for r in self.rows]

    def part(self, rows: Rows, slots: int | None = None) -> Part:
        return Part(lengths=self.lengths[rows.ids], cells=rows.cells, make=partial(self.collate, rows, slots))

    def collate(self, rows: Rows, slots: int | None = None) -> MicroBatch:
        return collate([self.samples[i] for i in rows.ids.tolist()], rows, self.head.fields, slots=slots)

    def even_packed(self, *, is_static: bool) -> Part:
        """One packed row of even samples, through the same kernel as ours: what is lost is raggedness alone."""
        lengths = self._even_lengths()
        longest = max(self.samples, key=lambda sample: len(sample["input_ids"]))
        sample = {name: np.resize(values, lengths[0]) for name, values in longest.items()}
        rows = packed_row(np.arange(len(lengths)), int(lengths.sum()))
        slots = self.slots if is_static else None
        make = partial(collate, [sample] * len(lengths), rows, self.head.fields, slots=slots)
        return Part(lengths=lengths, cells=rows.cells, make=make)

    def uniform(self, vocabulary: int) -> Part:
        """As many rows of the uniform length as fit: [B, L] tokens and labels, and the flattened cells with a label."""
        lengths = self._even_lengths()
        make = partial(self._uniform_tensors, (len(lengths), int(lengths[0])), vocabulary)
        return Part(lengths=lengths, cells=int(lengths.sum()), make=make)

    def _even_lengths(self) -> Ints:
        length = min(self.uniform_length, self.cells)
        return np.full(max(self.cells // length, 1), length)

    def _uniform_tensors(self, shape: tuple[int, int], vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, shape)
        if self.is_masked:
            labels = torch.where(torch.rand(ids.shape) < MASKED_SHARE, ids, IGNORE)
        else:
            labels = torch.roll(ids, -1, 1)
            labels[:, -1] = IGNORE
        return ids, labels, torch.nonzero(labels.flatten() != IGNORE)[:, 0]


def make_work(
    head: ModelHead, shape: Shape, name: Distribution, *, num: int, longest: int, cells: int, slots: int, seed: int = 0
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
