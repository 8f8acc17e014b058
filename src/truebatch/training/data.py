"""What a run trains on: samples, how they become micro-batches, and how long each is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truebatch.batch.collate import collate
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import CELLS, MicroBatch
from truebatch.data.fetch import Dataset, Transform
from truebatch.errors import DataError, TruebatchError
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.rows import padded_rows
from truebatch.progress import counted


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainData:
    """The samples of a run.

    >>> from truebatch import Field, TrainData
    >>> len(TrainData(samples=[{"ids": [1, 2]}, {"ids": [3]}], fields=[Field(name="ids")]).samples)
    2
    """

    samples: Dataset
    """Addressed by sample id, or a stream; each maps field names to lists, arrays or tensors."""
    fields: Sequence[Field]
    """How a micro-batch holds a sample."""
    measured: Measured | None = None
    """Lengths (and costs and counts); measured by reading every sample once if not given."""
    validation: Dataset | None = None
    """Samples that are never trained on; their loss decides early stopping and the best checkpoint."""
    transform: Transform | None = None
    """(sample, sample id, epoch) -> sample, for augmentation keyed by sample."""


def measure_by_reading(
    samples: Dataset, fields: Sequence[Field], *, what: str = "dataset", content: ContentHash | None = None
) -> Measured:
    """The length of every sample along the planned axis, read from the samples themselves; `content` sees each.

    A dataset that knows its lengths (an attribute `measured`) is not read.
    """
    if not isinstance(samples, Sized):
        raise DataError(
            f"the {what} has no length, so its samples cannot be measured before they are used",
            seen=f"a {type(samples).__name__} without len()",
            do="train on a stream with train() or `truebatch train`, which plan it in windows; elsewhere give a list, such "
            "as list(itertools.islice(stream, 1000))",
        )
    number = len(samples)
    known = getattr(samples, "measured", None)
    if isinstance(known, Measured) and number:
        return known
    if number == 0:
        raise DataError(f"the {what} has no samples", seen="0 samples", do="check its path")
    field = planned_field(fields)
    if field is None:
        return Measured(lengths=np.ones(number, dtype=np.int64), found="one cell a sample")
    lengths = np.empty(number, dtype=np.int64)
    for sample_id in counted(range(number), "reading samples for their lengths", number):
        sample = read_sample(samples, sample_id)
        lengths[sample_id] = length_of(sample, field.key, sample_id)
        if content is not None:
            content.add(sample_id, sample)
    return Measured(lengths=lengths, found=f"length of field {field.key!r}")


def planned_field(fields: Sequence[Field]) -> Field | None:
    """The field whose lengths are planned; None where every sample is one cell."""
    ragged = [f for f in fields if f.kind in ("along", "nested")] or [f for f in fields if f.kind == "flat"]
    return next((f for f in ragged if f.axis == CELLS), ragged[0] if ragged else None)


def read_sample(samples: Dataset, sample_id: int) -> Any:
    """A sample; what the dataset raises gets the sample's name."""
    try:
        return samples[sample_id]
    except TruebatchError:
        raise
    except Exception as error:  # a dataset may raise anything
        raise DataError(
            f"sample {sample_id} could not be loaded",
            seen=f"{type(error).__name__}: {str(error)[:200]}",
            do=f"call dataset[{sample_id}] alone to see it again, then mend the sample or leave it out",
        ) from error


def length_of(sample: Any, key: str, sample_id: int) -> int:
    """How long a list of a sample is."""
    try:
        return len(sample[key])
    except (KeyError, IndexError, TypeError) as error:
        names = f"fields {sorted(sample)}" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
        raise DataError(
            f"sample {sample_id} has no list {key!r} to measure",
            seen=f"{names} ({type(error).__name__})",
            do="return a dictionary with an entry for every declared field from the dataset",
        ) from error


def single_sample_batch_fn(data: TrainData, *, epoch: int) -> Callable[[int], MicroBatch]:
    """Sample id -> the micro-batch of that sample alone, as one-by-one training would see it."""

    def alone(sample_id: int) -> MicroBatch:
        sample = data.samples[sample_id]
        if data.transform is not None:
            sample = data.transform(sample, sample_id, epoch)
        width = measure_by_reading([sample], data.fields).lengths[0]
        return collate([sample], padded_rows(np.array([sample_id]), int(width)), data.fields)

    return alone


SELECTED = 128
"""Samples whose content is looked at, to tell whether the data is what it was: all of a small dataset."""


class ContentHash:
    """What some samples hold, the same ones every time, as one hash. Give it the samples in order, as they are read."""

    def __init__(self, data: TrainData) -> None:
        number = len(data.samples) if isinstance(data.samples, Sized) else 0
        chosen = np.arange(number)
        if number > SELECTED:
            chosen = np.sort(np.random.default_rng((SELECTED, number)).choice(number, SELECTED, replace=False))
        self._data, self._chosen, self._num_added = data, [int(i) for i in chosen], 0
        self._digest, self._first_two = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        self._problem = ""

    def add(self, sample_id: int, sample: Any) -> None:
        """Take a sample in, if it is one of the chosen."""
        if self._problem or self._num_added == len(self._chosen) or sample_id != self._chosen[self._num_added]:
            return
        try:
            _hash_sample(self._digest, sample_id, sample, self._data.fields)
            if self._num_added < 2:
                _hash_sample(self._first_two, sample_id, sample, self._data.fields)
        except _NotComparableError as error:
            self._problem = str(error)
        self._num_added += 1

    def finish(self) -> tuple[str, str]:
        """The hash, or why there is none; chosen samples that have not been read yet are read, and the first two again."""
        for sample_id in self._chosen[self._num_added :]:
            if not self._problem:
                self.add(sample_id, read_sample(self._data.samples, sample_id))
        if self._problem:
            return "", self._problem
        again, first_two = hashlib.blake2b(digest_size=16), self._chosen[:2]
        for sample_id in first_two:
            _hash_sample(again, sample_id, read_sample(self._data.samples, sample_id), self._data.fields)
        if again.digest() != self._first_two.digest():
            return "", f"sample {first_two[0]} or {first_two[-1]} differs each time it is read"
        return self._digest.hexdigest(), ""


def content_of(
    data: TrainData, *, read: ContentHash | None = None, say: Callable[[str], None] = lambda _line: None
) -> str:
    """A hash of what some samples hold, the same ones every time; empty where they cannot be compared, and `say` gets a line.

    That is so where samples are drawn anew when they are read, or hold what has no numbers. A sample that cannot be
    read raises `DataError` with its number. `read`: what has taken in the samples already, while they were measured.
    """
    found, problem = (read or ContentHash(data)).finish()
    if problem:
        say(f"warning: only the lengths of the data will be compared when this run is resumed: {problem}")
    return found


def _hash_sample(digest: Any, sample_id: int, sample: Any, fields: Sequence[Field]) -> None:
    for name, value in _hashed_values(sample, fields):
        digest.update(name.encode() + b"\0")
        try:
            _add_value(digest, value)
        except Exception as error:  # a value of the user's own may raise anything: it is reported and not compared
            raise _NotComparableError(f"sample {sample_id}, {name!r}: {type(error).__name__}: {error}") from error


class _NotComparableError(Exception):
    """A value whose content has no hash."""


def _hashed_values(sample: Any, fields: Sequence[Field]) -> list[tuple[str, Any]]:
    """The declared fields; where a transform makes them out of others, those others."""
    declared = sorted({f.key for f in fields})
    if not isinstance(sample, Mapping):
        return [(name, sample) for name in declared]
    found = [(name, sample[name]) for name in declared if name in sample]
    return found or [(str(name), value) for name, value in sample.items()]


def _add_value(digest: Any, value: Any) -> None:
    """By content: the same numbers give the same hash, as a list, an array or a tensor."""
    if isinstance(value, list | tuple) and any(isinstance(one, list | tuple | np.ndarray | Tensor) for one in value):
        for one in value:
            _add_value(digest, one)
        return
    array = value.detach().cpu() if isinstance(value, Tensor) else value
    numbers = np.asarray(array.float() if isinstance(array, Tensor) and array.dtype == torch.bfloat16 else array)
    digest.update(f"{numbers.shape}".encode())
    if numbers.dtype.kind == "O":  # objects are known by their place in memory only
        return
    digest.update(np.ascontiguousarray(numbers).astype(_KINDS.get(numbers.dtype.kind, numbers.dtype)).tobytes())


_KINDS: Mapping[str, Any] = {"b": np.int64, "i": np.int64, "u": np.int64, "f": np.float64}


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The first samples of a dataset."""

    samples: Dataset
    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, sample_id: int, /) -> Any:
        return self.samples[sample_id]


def first_samples(data: TrainData, limit: int | None) -> TrainData:
    """The data with at most `limit` samples to train on; None leaves all. Validation stays whole."""
    number = len(data.samples) if isinstance(data.samples, Sized) else 0
    if limit is None or number <= limit:
        return data
    measured = data.measured and replace(
        data.measured,
        lengths=data.measured.lengths[:limit],
        costs={name: column[:limit] for name, column in data.measured.costs.items()},
        counts={name: column[:limit] for name, column in data.measured.counts.items()},
        ids=data.measured.ids and data.measured.ids[:limit],
        fingerprint="",
    )
    return replace(data, samples=FirstSamples(data.samples, limit), measured=measured)
