"""A plan: which samples share a step, a rank, a micro-batch and a row, for one epoch, as flat arrays.

lengths -> samples (checked) -> steps -> cut for the ranks -> Plan; a step is read, or cut again for other ranks
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from truebatch.errors import DataError, PlanError
from truebatch.html_repr import html_table
from truebatch.planning.assign_ranks import StepLayout, deal_units, units_of_step
from truebatch.planning.config import PlanConfig, check_whole
from truebatch.planning.cut_steps import cut_steps, form_steps, keyed_sample_order
from truebatch.planning.pack_epoch import form_units
from truebatch.planning.rows import Ints, Rows, packed_row, padded_rows, row_width
from truebatch.planning.sample_table import Samples, check_lengths, measure_samples
from truebatch.planning.statistics import PlanStatistics, measure_plan

FINGERPRINT_VERSION = 1


def build_plan(
    lengths: ArrayLike,
    config: PlanConfig,
    *,
    epoch: int = 0,
    ranks: int = 1,
    costs: Mapping[str, ArrayLike] | None = None,
    counts: Mapping[str, ArrayLike] | None = None,
) -> Plan:
    """Plan one epoch: every sample once, no micro-batch over a limit, identical on every rank and machine.

    `costs` are the columns that `config.costs` limits; `counts` are columns to sum per step.

    >>> from truebatch import PlanConfig, build_plan
    >>> plan = build_plan([3, 1, 2, 4], PlanConfig(layout="packed", cells=6, samples_per_step=4), epoch=0, ranks=2)
    >>> [len(rank) for rank in plan.step(0)]  # micro-batches of each rank
    [1, 1]
    """
    check_whole("ranks", ranks, least=1)
    check_whole("epoch", epoch, least=0)
    samples = measure_samples(lengths, config, costs=costs or {}, counts=counts or {})
    ids = np.arange(len(samples.lengths), dtype=np.int64)
    if len(samples.dropped_ids):
        ids = np.delete(ids, samples.dropped_ids)
    if config.is_epoch_wide:
        cut = deal_units(samples, form_units(samples, ids, config, epoch), config, ranks=ranks)
    else:
        ids = keyed_sample_order(ids, config, epoch)
        cut = cut_steps(samples, ids, form_steps(samples, ids, config), config, ranks=ranks)
    return Plan(samples=samples, cut=_slim(cut, len(samples.lengths)), config=config, epoch=epoch, ranks=ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The steps of one epoch. The cost of reading a step depends only on its size, not on its position.

    >>> from truebatch import PlanConfig, build_plan
    >>> plan = build_plan([3, 1, 2, 4], PlanConfig(samples_per_step=2))
    >>> plan.num_steps, sorted(plan.step_sample_ids(0)) == sorted(i for rows in plan.step(0)[0] for i in rows.ids)
    (2, True)
    """

    samples: Samples = field(repr=False)
    """Lengths, costs and counts of the dataset, as they are planned."""
    cut: StepLayout = field(repr=False)
    """The steps, cut for `ranks`."""
    config: PlanConfig
    epoch: int
    ranks: int

    @property
    def num_steps(self) -> int:
        """Number of steps in the epoch."""
        return len(self.cut.step_starts) - 1

    @property
    def num_samples(self) -> int:
        """Number of samples in the epoch."""
        return len(self.cut.order)

    def step(self, step: int, *, ranks: int | None = None) -> list[list[Rows]]:
        """The micro-batches of each rank. Another number of ranks gets the same samples, as in a plan built for it."""
        self._check_step(step)
        if ranks is None or ranks == self.ranks:
            return self._ranks_of(self.cut, step, self.ranks)
        check_whole("ranks", ranks, least=1)
        return self._ranks_of(self._cut_again(step, ranks), 0, ranks)

    def step_sample_ids(self, step: int) -> Ints:
        """The sample ids of a step, in the order the plan holds them."""
        self._check_step(step)
        first, last = (int(self.cut.micro_starts[self.cut.step_starts[s]]) for s in (step, step + 1))
        if self.cut.row_starts is not None:
            first, last = int(self.cut.row_starts[first]), int(self.cut.row_starts[last])
        return self._ids(self.cut, first, last)

    def step_counts(self, step: int) -> dict[str, int]:
        """The sum of every count over the samples of a step, known without reading them."""
        if not self.samples.counts:
            return {}
        ids = self.step_sample_ids(step)
        return {name: int(column[ids].sum()) for name, column in self.samples.counts.items()}

    def planned_lengths(self, ids: Ints) -> Ints:
        """[n] the length of each sample in this plan: shorter than the sample itself only if it is cut."""
        return self.samples.lengths[ids].astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of lengths, costs, counts and settings: equal fingerprints give equal plans for an epoch."""
        digest = hashlib.blake2b(digest_size=16)
        settings = {"version": FINGERPRINT_VERSION, "num": len(self.samples.lengths), **self.config.to_dict()}
        digest.update(json.dumps(settings, sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self._measured_lengths(), dtype="<i4").data)
        for kind, columns in (("cost", self.samples.costs), ("count", self.samples.counts)):
            for name in sorted(columns):
                digest.update(json.dumps([kind, name]).encode())
                digest.update(np.ascontiguousarray(columns[name], dtype="<i8").data)
        return digest.hexdigest()

    @cached_property
    def statistics(self) -> PlanStatistics:
        """Statistics of the plan: fill, waste, micro-batches, balance."""
        return measure_plan(self.samples, self.cut, self.config, self.ranks)

    def check_lengths(self, lengths: ArrayLike) -> None:
        """Raise if the dataset is not the one this plan was made for; the error names the first sample that changed."""
        now, then = check_lengths(lengths), self._measured_lengths()
        if len(now) != len(then):
            raise DataError(
                "the number of samples in the dataset changed since it was measured",
                seen=f"{len(now):,} samples now, {len(then):,} in the plan",
                do="plan again, or give the dataset the plan was made for",
            )
        is_changed = now != then
        if is_changed.any():
            first = int(np.argmax(is_changed))
            raise DataError(
                f"{int(is_changed.sum()):,} samples changed since the dataset was measured",
                seen=f"sample {first} has {now[first]:,} tokens now, {then[first]:,} in the plan",
                do="plan again, or give the dataset the plan was made for",
            )

    def __str__(self) -> str:
        said = self.statistics
        return (
            f"Plan of epoch {self.epoch}: {said.samples:,} samples in {said.steps:,} steps of {self.config.step_size} "
            f"and {said.micro_batches:,} {self.config.layout} micro-batches over {self.ranks} ranks, waste {said.waste:.2%}"
        )

    def _repr_html_(self) -> str:
        return html_table(self.statistics.to_dict().items(), title=str(self))

    def _measured_lengths(self) -> Any:
        lengths = self.samples.lengths
        if len(self.samples.cut_ids):
            lengths = lengths.copy()
            lengths[self.samples.cut_ids] = self.samples.cut_from
        return lengths

    def _cut_again(self, step: int, ranks: int) -> StepLayout:
        if self.config.is_epoch_wide:
            units = units_of_step(self.samples, self.cut, step, self.config)
            return deal_units(self.samples, units, self.config, ranks=ranks)
        ids = keyed_sample_order(self.step_sample_ids(step), self.config, self.epoch)
        whole = np.array([0, len(ids)], dtype=np.int64)
        return cut_steps(self.samples, ids, whole, self.config, ranks=ranks)

    def _ranks_of(self, cut: StepLayout, step: int, ranks: int) -> list[list[Rows]]:
        first, last = int(cut.step_starts[step]), int(cut.step_starts[step + 1])
        micro = [self._micro_batch(cut, m) for m in range(first, last)]
        per_rank = len(micro) // ranks
        return [micro[r * per_rank : (r + 1) * per_rank] for r in range(ranks)]

    def _micro_batch(self, cut: StepLayout, micro: int) -> Rows:
        first, last = int(cut.micro_starts[micro]), int(cut.micro_starts[micro + 1])
        if cut.row_starts is not None:
            starts = np.asarray(cut.row_starts[first : last + 1], dtype=np.int64)
            ids = self._ids(cut, int(starts[0]), int(starts[-1]))
            return Rows(ids, starts - starts[0], int(self.config.row_cells or 0), "packed")
        ids = self._ids(cut, first, last)
        lengths = self.planned_lengths(ids)
        if self.config.layout == "packed":
            return packed_row(ids, int(row_width(lengths.sum(), self.config.widths)))
        return padded_rows(ids, int(lengths.max(initial=0)))

    def _ids(self, cut: StepLayout, first: int, last: int) -> Ints:
        ids = np.asarray(cut.order[first:last], dtype=np.int64)
        if (ids.view(np.uint64) >= len(self.samples.lengths)).any():  # below 0, or too large
            raise DataError(
                "the plan names a sample that does not exist",
                seen=f"ids from {ids.min()} to {ids.max()}, {len(self.samples.lengths):,} samples",
                do="the plan file is damaged: plan again",
            )
        return ids

    def _check_step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step < self.num_steps:
            raise PlanError(
                "this plan has no such step",
                seen=f"step {step!r}, {self.num_steps:,} steps",
                do=f"use a step from 0 to {self.num_steps - 1:,}",
            )


def _slim(cut: StepLayout, num: int) -> StepLayout:
    """Store sample ids in 32 bits if they fit, so that plans of very many samples stay small."""
    order = cut.order.astype(np.int32) if num <= 2**31 - 1 else cut.order
    return StepLayout(order, cut.micro_starts, cut.step_starts, cut.row_starts)
