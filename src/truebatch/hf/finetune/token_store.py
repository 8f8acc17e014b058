"""Samples as token ids, in flat arrays: small in memory, and cached under the content they were made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from truebatch.errors import DataError
from truebatch.io.array_files import read_arrays, write_arrays
from truebatch.planning.rows import Ints

ONCE = "once:"
"""Columns with one number a sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """The numbers of all samples end to end; sample i has those from starts[i] to starts[i + 1]."""

    values: Ints
    starts: Ints

    def of(self, sample_id: int) -> Ints:
        """The numbers of one sample."""
        return self.values[self.starts[sample_id] : self.starts[sample_id + 1]]

    def lengths(self) -> Ints:
        """[N]: how many numbers each sample has."""
        found: Ints = np.diff(self.starts)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TokenStore:
    """A data file as token ids: a dataset whose samples are dictionaries of arrays."""

    columns: Mapping[str, Column]
    label_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines for the start of a run: what was read, what was left out."""

    def __len__(self) -> int:
        return len(self.columns["input_ids"].starts) - 1

    def __getitem__(self, sample_id: int, /) -> dict[str, Any]:
        if not 0 <= sample_id < len(self):
            raise IndexError(sample_id)
        return {
            name.removeprefix(ONCE): column.of(sample_id)[0] if name.startswith(ONCE) else column.of(sample_id)
            for name, column in self.columns.items()
        }


def make_columns(samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Column]:
    """Columns from the encoded samples; all have the same keys."""
    names = list(samples[0]) if samples else ["input_ids"]
    return {name: _column([sample[name] for sample in samples]) for name in names}


def _column(parts: Sequence[Sequence[int]]) -> Column:
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    values = np.fromiter((number for part in parts for number in part), dtype=np.int64, count=int(starts[-1]))
    return Column(values, starts)


def save_encoded(encoded: TokenStore, file: Path) -> None:
    """Write it to `file`; readers see the old state or the new one, never a part."""
    arrays: dict[str, Any] = {}
    for name, column in encoded.columns.items():
        arrays |= {f"values:{name}": column.values, f"starts:{name}": column.starts}
    try:
        write_arrays(file, arrays, {"label_names": encoded.label_names, "notes": encoded.notes})
    except OSError as error:
        raise DataError(
            "the encoded samples cannot be cached",
            seen=f"{file.parent}: {error}",
            do="name another folder in the environment variable TRUEBATCH_CACHE",
        ) from error


def load_encoded(file: Path) -> TokenStore | None:
    """What was saved in `file`; None if nothing was, or it is damaged."""
    found = read_arrays(file)
    if found is None:
        return None
    arrays, about = found
    names = [name.removeprefix("values:") for name in arrays if name.startswith("values:")]
    try:
        columns = {name: Column(arrays[f"values:{name}"], arrays[f"starts:{name}"]) for name in names}
        return TokenStore(columns, tuple(about["label_names"]), tuple(about["notes"]))
    except KeyError:
        return None  # Encoding again replaces it; nothing is lost but time.
