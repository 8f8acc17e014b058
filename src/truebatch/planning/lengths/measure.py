"""Measure every sample of a dataset once: length, costs and counts, with a cache.

file or sequence -> samples -> lengths [N], costs {name: [N]}, counts {name: [N]}
"""

from __future__ import annotations

import hashlib
import traceback
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from truebatch.errors import ConfigError, DataError
from truebatch.io.data_files import Placed, read_samples
from truebatch.io.text_encoding import open_file
from truebatch.planning.lengths.length_field import Reading, choose_reading, read_length, read_text_of
from truebatch.planning.lengths.measured_values import Measured, load_measured, save_measured
from truebatch.planning.lengths.token_count import Tokenizer, load_tokenizer
from truebatch.planning.rows import Ints
from truebatch.progress import counted

__all__ = ["Cost", "Measured", "content_hash", "measure", "require_unchanged"]

WAY = "1"
"""Incremented whenever the same file would be measured differently."""
CHUNK = 1024

Cost = str | Callable[[Any], int]
"""A field of the sample (an integer, or something to count) or a function of the sample."""


def measure(
    source: str | Path | Sequence[Any],
    *,
    field: str | None = None,
    tokenizer: str | Path | None = None,
    costs: Mapping[str, Cost] | None = None,
    counts: Mapping[str, Cost] | None = None,
    cache: Path | None = None,
) -> Measured:
    """Measure every sample of a data file or of any sequence, in order, one sample in memory at a time.

    `field` selects what the length is read from; by default a known field is found and reported in `found`. With
    `tokenizer` (a folder holding tokenizer.json) text counts tokens, otherwise characters. With `cache` (a
    folder) a file is measured once: the key is a hash of the content and the settings, so a changed file is
    always measured again.

    >>> from truebatch import measure
    >>> measured = measure([{"text": "hello"}, {"text": "you"}])
    >>> measured.lengths.tolist(), measured.unit
    ([5, 3], 'characters')
    """
    way = _MeasureMethod(field, load_tokenizer(tokenizer), dict(costs or {}), dict(counts or {}))
    if not isinstance(source, (str, Path)):
        if cache is not None:
            _refuse_cache("a sequence in memory", type(source).__name__)
        return _measure(_placed(source), way, fingerprint="")
    path = Path(source)
    fingerprint = f"{content_hash(path)}-{way.hash(cached=cache is not None)}"
    entry = cache / f"{fingerprint}.npz" if cache is not None else None
    if entry is not None and (found := load_measured(entry, fingerprint)) is not None:
        return found
    measured = _measure(_read(path, way), way, fingerprint=fingerprint, name=str(path))
    if entry is not None:
        save_measured(measured, entry)
    return measured


def require_unchanged(measured: Measured, source: str | Path | Sized) -> None:
    """Raise `DataError` if a file (by content) or sequence (by count) is not what was measured."""
    if isinstance(source, (str, Path)):
        now, then = content_hash(Path(source)), measured.fingerprint.split("-")[0]
        seen = f"content {now[:12]}, measured {then[:12]}"
    else:
        now, then = str(len(source)), str(len(measured.lengths))
        seen = f"{now} samples, measured {then}"
    if now != then:
        raise DataError(
            f"{source if isinstance(source, (str, Path)) else 'the dataset'} changed since it was measured",
            seen=seen,
            do="measure and plan again: lengths of other samples would break the limits",
        )


def content_hash(path: Path) -> str:
    """Hash of a file's content; its name and date do not matter."""
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@dataclass(frozen=True, slots=True)
class _MeasureMethod:
    """How samples are measured."""

    field: str | None
    tokenizer: Tokenizer | None
    costs: dict[str, Cost]
    counts: dict[str, Cost]

    def hash(self, *, cached: bool) -> str:
        parts = [WAY, self.field or "", self.tokenizer.fingerprint if self.tokenizer else ""]
        for name, cost in (*self.costs.items(), *self.counts.items()):
            if cached and not isinstance(cost, str):
                _refuse_cache(f"the function that gives {name!r}", repr(cost))
            parts += [name, str(cost)]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _refuse_cache(what: str, seen: str) -> NoReturn:
    raise ConfigError(
        f"{what} cannot be cached: changes to it cannot be detected",
        seen=seen,
        do="omit `cache`, or measure a file by field names",
    )


def _placed(samples: Sequence[Any]) -> Iterator[Placed]:
    if not isinstance(samples, Sized) or getattr(samples, "ndim", 1) == 0:
        raise DataError(
            "a dataset needs a length and access by index",
            seen=f"a {type(samples).__name__}",
            do="pass a list or a dataset with __len__ and __getitem__; plan a stream in windows instead",
        )
    for index in range(len(samples)):
        yield f"sample {index}", _call(samples.__getitem__, index, f"sample {index} cannot be read")


def _read(path: Path, way: _MeasureMethod) -> Iterator[Placed]:
    named = [cost for cost in (*way.costs.values(), *way.counts.values()) if isinstance(cost, str)]
    if path.suffix.lower() != ".parquet" or len(named) < len(way.costs) + len(way.counts):
        return read_samples(path)
    first = next(read_samples(path), None)
    if first is None:
        return iter(())
    # Otherwise a column of image bytes, say, would be read for nothing.
    return read_samples(path, columns=[*choose_reading(first[1], first[0], way.field).fields, *named, "id"])


def _measure(
    samples: Iterator[Placed], way: _MeasureMethod, *, fingerprint: str, name: str = "the dataset"
) -> Measured:
    first = next(samples, None)
    if first is None:
        raise DataError(f"{name} holds no samples", seen="nothing to measure", do="check that it is the right one")
    reading = choose_reading(first[1], first[0], way.field)
    columns = _Columns(reading, way)
    columns.add([first])
    chunk: list[Placed] = []
    for placed in counted(samples, f"measuring {name}"):
        chunk.append(placed)
        if len(chunk) == CHUNK:
            columns.add(chunk)
            chunk = []
    columns.add(chunk)
    return columns.finish(fingerprint)


class _Columns:
    """The columns measured so far."""

    def __init__(self, reading: Reading, way: _MeasureMethod) -> None:
        self.reading, self.way = reading, way
        self.lengths = array("q")
        self.others = {name: array("q") for name in (*way.costs, *way.counts)}
        self.ids: list[str] | None = []

    def add(self, chunk: list[Placed]) -> None:
        lengths = self._lengths(chunk)
        for (place, sample), length in zip(chunk, lengths, strict=True):
            if not 0 < length < 2**62:
                raise DataError(
                    f"{place} has no usable length",
                    seen=f"length {length} from the {self.reading.words}",
                    do="remove that sample; a sample needs at least one token",
                )
            self.lengths.append(length)
            for name, cost in (*self.way.costs.items(), *self.way.counts.items()):
                self.others[name].append(_cost(name, cost, sample, place))
            self._note_id(sample)

    def _lengths(self, chunk: list[Placed]) -> list[int]:
        if self.way.tokenizer is None or self.reading.kind in ("number", "ids"):
            return [read_length(self.reading, sample, place) for place, sample in chunk]
        return self.way.tokenizer.count([read_text_of(self.reading, sample, place) for place, sample in chunk])

    def _note_id(self, sample: Any) -> None:
        name = sample.get("id") if isinstance(sample, Mapping) else None
        if self.ids is not None and isinstance(name, (str, int)):
            self.ids.append(str(name))
        else:
            self.ids = None

    def finish(self, fingerprint: str) -> Measured:
        is_text = self.reading.kind in ("text", "chat")
        unit = "characters" if is_text and self.way.tokenizer is None else "tokens"
        return Measured(
            lengths=_int64(self.lengths),
            costs={name: _int64(self.others[name]) for name in self.way.costs},
            counts={name: _int64(self.others[name]) for name in self.way.counts},
            ids=tuple(self.ids) if self.ids else None,
            unit=unit,
            found=self.reading.words,
            fingerprint=fingerprint,
        )


def _cost(name: str, cost: Cost, sample: Any, place: str) -> int:
    if isinstance(cost, str):
        return _whole_number(read_length(choose_reading(sample, place, cost), sample, place), f"{place}: {name}")
    return _whole_number(_call(cost, sample, f"{place}: the function that gives {name!r} failed"), f"{place}: {name}")


def _call(function: Callable[[Any], Any], argument: Any, wrong: str) -> Any:
    """Run user code; an error keeps its line and gets the sample at which it happened."""
    try:
        return function(argument)
    except Exception as error:  # code of the user's may raise anything
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            wrong,
            seen=f"{type(error).__name__}: {str(error)[:120]} at {line.filename}:{line.lineno}",
            do="correct that sample, or the code that reads it",
        ) from error


def _whole_number(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 2**62:
        raise DataError(f"{place} must be an integer of 0 or more", seen=repr(value), do="correct that sample")
    return int(value)


def _int64(values: array[int]) -> Ints:
    return np.frombuffer(values, dtype=np.int64).copy() if len(values) else np.empty(0, np.int64)
