"""Load the steps of a plan, with worker processes, pinned memory and prefetch.

plan -> tasks, a bounded number in flight -> workers (or this process) -> micro-batches in order -> steps
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Generator, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice, tee
from typing import Literal

import numpy as np
import torch

from truebatch.batch.fields import Field, Side, check_fields
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.fetch import Dataset, LoadTask, Recipe, Transform, read_microbatch
from truebatch.data.worker_pool import WorkerPool
from truebatch.errors import ConfigError, DataError
from truebatch.planning.plan import Plan
from truebatch.planning.rows import Ints, Rows, longest_first
from truebatch.planning.sample_table import Samples

StartMethod = Literal["default", "fork", "spawn", "forkserver"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """Loader options; only `side` changes the content of micro-batches."""

    workers: int = 0
    """Number of worker processes; 0 loads in this process (where a hanging dataset cannot be detected)."""
    prefetch: int = 2
    """Micro-batches that each worker prefetches."""
    pin_memory: bool = False
    """Page-locked memory, so that copies to a CUDA device can overlap with computation."""
    timeout_seconds: float = 300.0
    """A worker that spends longer than this on one sample is reported as hanging."""
    restarts: int = 0
    """How many workers that died or hung are replaced; the next one is an error, and so is a sample that kills two
    workers."""
    start_method: StartMethod = "default"
    """The multiprocessing start method; `default` is the platform's."""
    side: Side = "right"
    """The side on which rows are padded."""
    slots: int | None = None
    """Entries of the segment table of packed rows, for shapes that never change."""
    row_cells: int | None = None
    """Cells of every packed row, for shapes that never change; by default what its samples need, or what the plan
    says."""

    first_id: int = 0
    """The id that the dataset has for the plan's sample 0, where the plan is of a part of a stream."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("prefetch", 1), ("restarts", 0)):
            _check_least(name, getattr(self, name), least)
        if not (math.isfinite(self.timeout_seconds) and self.timeout_seconds > 0):
            raise ConfigError(
                "timeout_seconds must be a number of seconds above 0",
                seen=f"timeout_seconds={self.timeout_seconds!r}",
                do="give the maximum time for loading one sample, for example 300",
            )
        _check_choice("start_method", self.start_method, ("default", "fork", "spawn", "forkserver"))
        _check_choice("side", self.side, ("left", "right"))


@dataclass(frozen=True, slots=True, eq=False)
class LoadedStep:
    """This rank's part of one step."""

    number: int
    """The number of the step; loading can resume at `number + 1` once it is done."""
    batches: tuple[MicroBatch, ...]
    """The same number on every rank; a rank with no samples gets empty ones."""
    counts: Mapping[str, int]
    """What the loss terms are divided by: the counts of the whole step, over all ranks."""
    fields: Sequence[Field] = ()
    """How the micro-batches hold a sample, for whoever takes them apart; empty where that is not known."""

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def load_steps(
    plan: Plan,
    dataset: Dataset,
    fields: Sequence[Field],
    *,
    rank: int = 0,
    ranks: int | None = None,
    start_step: int = 0,
    transform: Transform | None = None,
    config: LoaderConfig | None = None,
) -> Generator[LoadedStep, None, None]:
    """Iterate over this rank's part of the steps of a plan, from `start_step` on.

    The micro-batches are bit-identical and in the same order for any number of workers. A sample that cannot be loaded,
    or a worker that dies or hangs, is an error that names the sample. An error about a sample is raised at its own
    step, a lost worker at once. Closing or dropping the iterator stops the workers.

    Args:
        dataset: samples by sample id; each maps field names to lists, arrays or tensors.
        ranks: use the plan with this number of ranks instead of its own.
        transform: (sample, sample id, epoch) -> sample, run where the sample is loaded. Randomness in it must be keyed
            by these numbers, for example `np.random.default_rng((seed, epoch, sample_id))`.

    >>> from truebatch import Field, PlanConfig, build_plan, load_steps
    >>> samples = [{"ids": [1, 2, 3]}, {"ids": [4]}, {"ids": [5, 6]}]
    >>> plan = build_plan([3, 1, 2], PlanConfig(samples_per_step=2))
    >>> [sum(batch.num_samples for batch in step) for step in load_steps(plan, samples, [Field(name="ids")])]
    [2, 1]
    """
    config = config or LoaderConfig()
    check_fields(fields)
    check_place(plan, rank, ranks, start_step)
    _check_dataset(plan, dataset)
    _check_pinning(config)
    recipe = Recipe(
        dataset=dataset,
        fields=tuple(fields),
        transform=transform,
        epoch=plan.epoch,
        side=config.side,
        slots=config.slots,
    )
    steps = _plan_steps(plan, rank, ranks, start_step, config)
    return _load_with_workers(steps, recipe, config) if config.workers else _load_here(steps, recipe, config)


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    number: int
    tasks: list[LoadTask]
    counts: Mapping[str, int]


def _plan_steps(
    plan: Plan, rank: int, ranks: int | None, start_step: int, config: LoaderConfig
) -> Iterator[_PlannedStep]:
    first = 0
    for step in range(start_step, plan.num_steps):
        mine = [_lay(plan, rows, config.row_cells) for rows in plan.step(step, ranks=ranks)[rank]]
        tasks = [_task(plan.samples, rows, first + index, step, index) for index, rows in enumerate(mine)]
        if config.first_id:
            tasks = [replace(task, rows=replace(task.rows, ids=task.rows.ids + config.first_id)) for task in tasks]
        first += len(tasks)
        yield _PlannedStep(step, tasks, plan.step_counts(step))


def _lay(plan: Plan, rows: Rows, row_cells: int | None) -> Rows:
    """Sort packed rows longest sample first, which suits attention kernels, and set their width."""
    if rows.layout != "packed" or not rows.num_rows:
        return rows
    laid = longest_first(rows, plan.planned_lengths(rows.ids))
    return laid if row_cells is None else replace(laid, width=row_cells)


def _task(samples: Samples, rows: Rows, number: int, step: int, index: int) -> LoadTask:
    return LoadTask(
        number=number,
        step=step,
        index=index,
        rows=rows,
        lengths=samples.lengths[rows.ids].astype(np.int64),
        measured=_measured(samples, rows.ids) if len(samples.cut_ids) else None,
        counts={name: int(column[rows.ids].sum()) for name, column in samples.counts.items()},
    )


def _measured(samples: Samples, ids: Ints) -> Ints:
    """[N] lengths before cutting."""
    at = np.minimum(np.searchsorted(samples.cut_ids, ids), len(samples.cut_ids) - 1)
    return np.where(samples.cut_ids[at] == ids, samples.cut_from[at], samples.lengths[ids]).astype(np.int64)


def _load_here(
    steps: Iterator[_PlannedStep], recipe: Recipe, config: LoaderConfig
) -> Generator[LoadedStep, None, None]:
    for step in steps:
        batches = [read_microbatch(recipe, task, report=lambda _: None) for task in step.tasks]
        yield LoadedStep(step.number, tuple(_pinned(b, config) for b in batches), step.counts, recipe.fields)


def _load_with_workers(
    steps: Iterator[_PlannedStep], recipe: Recipe, config: LoaderConfig
) -> Generator[LoadedStep, None, None]:
    pool = WorkerPool(
        recipe,
        workers=config.workers,
        timeout_seconds=config.timeout_seconds,
        restarts=config.restarts,
        start_method=None if config.start_method == "default" else config.start_method,
    )
    # If the program ends with the iterator open, stop the workers while the interpreter is still intact.
    atexit.register(pool.close)
    forget = atexit.unregister  # kept here: an iterator collected at interpreter exit finds no modules any more
    try:
        for_workers, for_us = tee(steps)
        tasks = (task for step in for_workers for task in step.tasks)
        for task in islice(tasks, config.workers * config.prefetch):
            pool.submit(task)
        for step in for_us:
            batches = []
            for task in step.tasks:
                batches.append(_pinned(pool.take(task.number, last=step.tasks[-1].number), config))
                for following in islice(
                    tasks, 1
                ):  # one taken, one more submitted: never more in flight than configured
                    pool.submit(following)
            yield LoadedStep(step.number, tuple(batches), step.counts, recipe.fields)
    finally:
        pool.close()
        forget(pool.close)


def _pinned(batch: MicroBatch, config: LoaderConfig) -> MicroBatch:
    return batch.pin_memory() if config.pin_memory else batch


def check_place(plan: Plan, rank: int, ranks: int | None, start_step: int) -> None:
    """Reject a rank or step that the plan does not have."""
    number = plan.ranks if ranks is None else ranks
    if not 0 <= rank < number:
        raise ConfigError(
            "this rank does not exist",
            seen=f"rank={rank}, ranks={number}",
            do=f"give a rank from 0 to {number - 1}, or another number of ranks",
        )
    if not 0 <= start_step <= plan.num_steps:
        raise ConfigError(
            "start_step is not a step of the plan",
            seen=f"start_step={start_step}, the plan has {plan.num_steps} steps",
            do=f"give a step from 0 to {plan.num_steps} (the last loads nothing)",
        )


def _check_dataset(plan: Plan, dataset: Dataset) -> None:
    planned = len(plan.samples.lengths)
    if isinstance(dataset, Sized) and len(dataset) < planned:
        raise DataError(
            f"the dataset is smaller than the plan: it has no sample {len(dataset)}",
            seen=f"{len(dataset):,} samples, {planned:,} when it was measured",
            do="measure and plan again, or give the dataset the plan was made for",
        )


def _check_pinning(config: LoaderConfig) -> None:
    if config.pin_memory and not torch.cuda.is_available():
        raise ConfigError(
            "pinned memory needs a CUDA device",
            seen="pin_memory=True, torch.cuda.is_available() is False",
            do="omit pin_memory on this machine",
        )


def _check_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}",
            seen=f"{name}={value!r}",
            do=f"give {name} as an integer of {least} or more",
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is not known", seen=f"{name}={value!r}", do=f"use {', '.join(map(repr, choices))}")
