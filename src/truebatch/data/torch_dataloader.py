"""Use a plan with torch's own DataLoader, for code that already has one.

DataLoader(planned_samples(dataset), batch_sampler=batch_sampler(plan), collate_fn=collate_fn(fields), num_workers=2)

`load_steps` does the same and more: it yields whole steps, names the sample on which a worker died, and checks lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch.batch.collate import collate
from truebatch.batch.fields import Field, Side, check_fields
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.fetch import Dataset, Recipe, Sample, Transform, read_sample
from truebatch.data.loader import check_place
from truebatch.errors import BatchError, ConfigError
from truebatch.planning.plan import Plan
from truebatch.planning.rows import Rows


class SampleIds(list[int]):
    """The sample ids of one micro-batch, in row order; `rows` says in which row each is."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows.ids.tolist())
        self.rows = rows

    def __reduce__(self) -> tuple[object, ...]:
        return SampleIds, (self.rows,)  # so that a DataLoader can pickle it for its workers


class _RowSamples(list[Sample]):
    """The samples of one micro-batch on their way from the dataset to collate."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class BatchSampler:
    """The micro-batches of one rank as sample ids, in order."""

    plan: Plan
    rank: int
    ranks: int | None
    start_step: int

    def __iter__(self) -> Iterator[SampleIds]:
        for step in range(self.start_step, self.plan.num_steps):
            yield from map(SampleIds, self.plan.step(step, ranks=self.ranks)[self.rank])

    def __len__(self) -> int:
        """Number of micro-batches; computes the rest of the plan."""
        steps = range(self.start_step, self.plan.num_steps)
        return sum(len(self.plan.step(step, ranks=self.ranks)[self.rank]) for step in steps)


@dataclass(frozen=True, slots=True)
class PlannedSamples:
    """A dataset that is indexed with a whole micro-batch at a time, so that its rows are kept."""

    recipe: Recipe

    def __getitem__(self, sample_id: int) -> Sample:
        return read_sample(self.recipe, sample_id)

    def __getitems__(self, ids: list[int]) -> list[Sample]:
        samples = _RowSamples(read_sample(self.recipe, sample_id) for sample_id in ids)
        if isinstance(ids, SampleIds):
            samples.rows = ids.rows
        return samples


def batch_sampler(plan: Plan, *, rank: int = 0, ranks: int | None = None, start_step: int = 0) -> BatchSampler:
    """Lists of sample ids, one per micro-batch, for `DataLoader(batch_sampler=...)`.

    A rank with no samples gets empty lists, and from `collate_fn` empty micro-batches.
    """
    check_place(plan, rank, ranks, start_step)
    if len(plan.samples.cut_ids):
        raise ConfigError(
            "this plan cuts samples, which a DataLoader would not do",
            seen=f"{len(plan.samples.cut_ids)} samples to cut, the first is sample {plan.samples.cut_ids[0]}",
            do="load it with load_steps, or plan with overlong='drop'",
        )
    return BatchSampler(plan, rank, ranks, start_step)


def planned_samples(dataset: Dataset, *, transform: Transform | None = None, epoch: int = 0) -> PlannedSamples:
    """Wrap the dataset for `DataLoader(dataset)`, to go with `batch_sampler` and `collate_fn`."""
    return PlannedSamples(Recipe(dataset=dataset, fields=(), transform=transform, epoch=epoch))


def collate_fn(
    fields: Sequence[Field], *, side: Side = "right", slots: int | None = None
) -> Callable[[list[Any]], MicroBatch]:
    """For `DataLoader(collate_fn=...)`: the samples of one micro-batch as tensors, in the rows of the plan."""
    check_fields(fields)
    return _Collate(tuple(fields), side, slots)


@dataclass(frozen=True, slots=True)
class _Collate:
    """A picklable collate function, for spawned workers."""

    fields: tuple[Field, ...]
    side: Side
    slots: int | None

    def __call__(self, samples: list[Any]) -> MicroBatch:
        rows = getattr(samples, "rows", None)
        if rows is None:
            raise BatchError(
                "the samples do not say which rows they belong to",
                seen=f"a {type(samples).__name__} of {len(samples)} samples",
                do="pass planned_samples(dataset) and batch_sampler(plan) to the DataLoader, not the dataset alone",
            )
        return collate(samples, rows, self.fields, side=self.side, slots=self.slots)
