"""Events as they stand in files, column by column: one Parquet file a stay, or one long table of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import DataError
from truebatch.io.data_files import open_parquet, read_samples
from truebatch.io.text_encoding import nearest
from truebatch.planning.rows import Ints
from truebatch_systems.seqset_vae.config import ColumnConfig

TIME_NAMES = ("minute", "time")
"""The files of the carry-forward tool call it `time`."""


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Some events of one file, in its order."""

    path: Path
    rows: Ints
    """[n] the row of the file (Parquet, from 0) or its line (text)."""
    variable: NDArray[Any]
    """[n] names."""
    value: NDArray[np.float64]
    minute: NDArray[np.float64]
    set_index: Ints | None = None
    patient: NDArray[Any] | None = None
    label: NDArray[Any] | None = None
    is_carried: bool = False
    """Written by the carry-forward tool: values are normalised already."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, at: int) -> str:
        """Where event `at` stands, for a message."""
        is_text = self.path.suffix.lower() in (".csv", ".tsv")
        return f"{self.path}:{self.rows[at]}" if is_text else f"{self.path} row {self.rows[at]}"

    def take(self, keep: Any) -> Events:
        """The events at these places."""
        return replace(
            self,
            rows=self.rows[keep],
            variable=self.variable[keep],
            value=self.value[keep],
            minute=self.minute[keep],
            set_index=None if self.set_index is None else self.set_index[keep],
            patient=None if self.patient is None else self.patient[keep],
            label=None if self.label is None else self.label[keep],
        )


def read_stay_file(path: Path, columns: ColumnConfig) -> Events:
    """The events of one Parquet file, which is one stay."""
    return _events(path, _read_parquet(path), columns)


def read_long_table(path: Path, columns: ColumnConfig) -> Events:
    """The events of all patients from one CSV, TSV or Parquet file."""
    table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_text(path)
    return _events(path, table, columns, is_long=True)


def by_patient(events: Events) -> Iterator[tuple[str, Events]]:
    """The events of each patient of a long table, patients in order of first appearance."""
    assert events.patient is not None
    names, first, code = np.unique(events.patient, return_index=True, return_inverse=True)
    order = np.argsort(code, kind="stable")
    ends = np.cumsum(np.bincount(code, minlength=len(names)))
    for at in np.argsort(first):
        start = ends[at - 1] if at else 0
        yield str(names[at]), events.take(order[start : ends[at]])


def _events(path: Path, table: dict[str, NDArray[Any]], columns: ColumnConfig, *, is_long: bool = False) -> Events:
    time = columns.time
    if time not in table and time in TIME_NAMES:
        time = next((name for name in TIME_NAMES if name in table), time)
    needed = [time, columns.variable, columns.value, *([columns.patient] if is_long else [])]
    _check_columns(path, table, needed)
    length = len(table[time])
    return Events(
        path=path,
        rows=table.get(_LINES, np.arange(length)),
        variable=_texts(table[columns.variable]),
        value=_numbers(table[columns.value]),
        minute=_numbers(table[time]) * columns.unit_minutes,
        set_index=_set_index(path, table, columns.set_index),
        patient=_texts(table[columns.patient]) if is_long else None,
        label=table.get(columns.label) if is_long else None,
        is_carried="is_carry" in table,
    )


def _check_columns(path: Path, table: dict[str, Any], needed: Sequence[str]) -> None:
    for name in needed:
        if name not in table:
            have = [c for c in table if c != _LINES]
            raise DataError(
                f"{path} has no column {name!r}{nearest(name, have)}",
                seen=f"columns {', '.join(have[:8])}",
                do="name the file's own columns: --set columns.time=... (patient, variable, value, set_index, label)",
            )


_LINES = "\0lines"


def _read_parquet(path: Path) -> dict[str, NDArray[Any]]:
    with open_parquet(path) as file:
        table = file.read(columns=[name for name in file.schema_arrow.names if not _is_vector(name)])
    return {name: _to_numpy(table.column(name)) for name in table.column_names}


def _is_vector(name: str) -> bool:
    """The carry-forward tool writes each variable's vector into every row, as v0, v1, ..."""
    return name[:1] == "v" and name[1:].isdigit()


def _to_numpy(column: Any) -> NDArray[Any]:
    return np.asarray(column.to_numpy(zero_copy_only=False) if column.num_chunks == 1 else column.to_numpy())


def _read_text(path: Path) -> dict[str, NDArray[Any]]:
    rows, lines = [], []
    for place, row in read_samples(path):
        rows.append(row)
        lines.append(int(place.rpartition(":")[2]))
    names = list(rows[0]) if rows else []
    if not rows:
        raise DataError(f"{path} has no events", seen="a header at most", do="check that this is the file you meant")
    table = {name: np.array([row[name] for row in rows], dtype=object) for name in names}
    return {**table, _LINES: np.array(lines, dtype=np.int64)}


def _texts(values: NDArray[Any]) -> NDArray[Any]:
    """Names; whole numbers are written without a decimal point, a missing one is empty."""
    return np.array([_text(value) for value in values], dtype=object)


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _numbers(values: NDArray[Any]) -> NDArray[np.float64]:
    """Numbers; what is none becomes NaN, which is then found as a fault with its place."""
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    return np.array([_number(value) for value in values], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        return float(value) if value not in (None, "") else math.nan
    except (TypeError, ValueError):
        return math.nan


def _set_index(path: Path, table: dict[str, NDArray[Any]], name: str) -> Ints | None:
    if name not in table:
        return None
    numbers = _numbers(table[name])
    wrong = np.flatnonzero(~(np.abs(numbers) < 2**53))  # NaN too
    if len(wrong):
        raise DataError(
            f"{path} row {int(wrong[0])}: an event without a set",
            seen=f"{name}={table[name][wrong[0]]!r}",
            do=f"number every set, or leave the column {name!r} out: events of one time are then a set",
        )
    return numbers.astype(np.int64)
