"""Fetch the samples of one micro-batch from a dataset and collate them, in the main process or in a worker."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from truebatch.batch.collate import collate
from truebatch.batch.fields import Field, Side
from truebatch.batch.microbatch import CELLS, MicroBatch, RowAxis
from truebatch.errors import DataError, LoaderError, TruebatchError
from truebatch.planning.rows import Ints, Rows

Sample = Mapping[str, Any]


class Dataset(Protocol):
    """Samples addressed by sample id."""

    def __getitem__(self, sample_id: int, /) -> Any: ...


Transform = Callable[[Any, int, int], Sample]
"""(sample, sample id, epoch) -> sample. Draw randomness from a generator seeded with these numbers, never from a
global one: then the result depends neither on workers, nor on ranks, nor on where a run was resumed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recipe:
    """How the samples of a run become micro-batches."""

    dataset: Dataset
    fields: Sequence[Field]
    transform: Transform | None = None
    epoch: int = 0
    side: Side = "right"
    slots: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadTask:
    """One micro-batch to load."""

    number: int
    """Its position in the sequence of this rank."""
    step: int
    index: int
    """Its position in the step."""
    rows: Rows
    lengths: Ints | None = None
    """[N] the planned length of every sample."""
    measured: Ints | None = None
    """[N] its length in the dataset, where the plan cuts samples; only what is longer than planned is cut."""
    counts: Mapping[str, int] | None = None


def read_microbatch(recipe: Recipe, task: LoadTask, *, report: Callable[[int], None]) -> MicroBatch:
    """Load, transform and collate. `report` is called with each sample id before that sample is read, and with -1
    before collate."""
    samples = []
    for at, sample_id in enumerate(task.rows.ids.tolist()):
        report(sample_id)
        samples.append(_cut_sample(read_sample(recipe, sample_id), at, task, recipe.fields))
    report(-1)
    batch = collate(samples, task.rows, recipe.fields, side=recipe.side, slots=recipe.slots, counts=task.counts)
    _check_lengths(batch, task)
    return batch


def read_sample(recipe: Recipe, sample_id: int) -> Sample:
    """One sample, transformed. Any exception of the dataset becomes a LoaderError that names the sample."""
    try:
        sample = recipe.dataset[sample_id]
        sample = sample if recipe.transform is None else recipe.transform(sample, sample_id, recipe.epoch)
    except TruebatchError:
        raise
    except Exception as error:  # a dataset or a transform may raise anything
        raise LoaderError(
            f"sample {sample_id} could not be loaded",
            seen=_describe(error),
            do=f"see the traceback; call dataset[{sample_id}] (and the transform) alone to reproduce it",
        ) from error
    if not isinstance(sample, Mapping):
        raise DataError(
            f"sample {sample_id} is not a mapping from field names to values",
            seen=f"{type(sample).__name__}: {sample!r:.60}",
            do="return a dict from the dataset, for example {'input_ids': [...]}",
        )
    return sample


def _describe(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message:.300} ({Path(last.filename).name}:{last.lineno}, in {last.name})"


def _cut_sample(sample: Sample, at: int, task: LoadTask, fields: Sequence[Field]) -> Sample:
    """The sample, or the part of it that the plan keeps. Cut before any shift, so no label comes from past the cut."""
    if task.lengths is None or task.measured is None or task.lengths[at] == task.measured[at]:
        return sample
    keys = {f.key for f in fields if f.axis == CELLS and f.kind != "once"}
    wrong = next((key for key in keys & set(sample) if len(sample[key]) != task.measured[at]), None)
    if wrong is not None:
        raise _changed(int(task.rows.ids[at]), len(sample[wrong]), int(task.measured[at]))
    return {key: value[: task.lengths[at]] if key in keys else value for key, value in sample.items()}


def _check_lengths(batch: MicroBatch, task: LoadTask) -> None:
    """A sample with another length than planned would silently change costs, counts and the balance of ranks."""
    cells = batch.axes.get(CELLS)
    if task.lengths is None or not isinstance(cells, RowAxis):
        return
    wrong = np.flatnonzero(task.lengths != np.array(cells.lengths, dtype=np.int64))
    if len(wrong):
        at = int(wrong[0])
        raise _changed(batch.sample_ids[at], cells.lengths[at], int(task.lengths[at]))


def _changed(sample_id: int, found: int, measured: int) -> DataError:
    return DataError(
        f"sample {sample_id} is not as long as it was when it was measured",
        seen=f"{found} tokens now, {measured} then",
        do="measure and plan again: the dataset changed, is measured in another unit, or a transform changes lengths",
    )
