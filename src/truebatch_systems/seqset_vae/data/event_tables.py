"""Events as they stand in files, column by column: one Parquet file a stay, or one long table of all of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import DataError
from truebatch.planning.rows import Ints
from truebatch_systems.seqset_vae.config import ColumnConfig
from truebatch_systems.seqset_vae.data.formats.shapes import shape_of
from truebatch_systems.seqset_vae.data.formats.tables import ColumnTable, header_of, read_table, table_kind
from truebatch_systems.seqset_vae.data.formats.times import read_numbers, read_times

VALUELESS = ", no value"
"""Ends the name of a variable where it has no value, if it has one elsewhere."""


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
    """[n] since admission, or minutes of the calendar while `is_clock`."""
    set_index: Ints | None = None
    patient: NDArray[Any] | None = None
    label: NDArray[Any] | None = None
    is_carried: bool = False
    """Written by the carry-forward tool: values are normalised already."""
    is_clock: bool = False
    """Times are those of the calendar, and are counted from the first event of a patient by `since_first`."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, at: int) -> str:
        """Where event `at` stands, for a message."""
        is_parquet = table_kind(self.path) == ".parquet"
        return f"{self.path} row {self.rows[at]}" if is_parquet else f"{self.path}:{self.rows[at]}"

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
    return since_first(events_of(read_table(path), columns, is_long=False))


def read_long_table(path: Path, columns: ColumnConfig) -> Events:
    """The events of all patients from one CSV, TSV or Parquet file. Times of the calendar are left as they are."""
    shape = shape_of(columns, header_of(path), is_long=True)
    events = events_of(read_table(path, texts=[shape.patient, shape.variable]), columns, is_long=True)
    if not len(events):
        raise DataError(f"{path} has no events", seen="a header at most", do="check that this is the file you meant")
    return events


def by_patient(events: Events) -> Iterator[tuple[str, Events]]:
    """The events of each patient of a long table, patients in order of first appearance."""
    assert events.patient is not None
    names, first, code = np.unique(events.patient, return_index=True, return_inverse=True)
    order = np.argsort(code, kind="stable")
    ends = np.cumsum(np.bincount(code, minlength=len(names)))
    for at in np.argsort(first):
        start = ends[at - 1] if at else 0
        yield str(names[at]), since_first(events.take(order[start : ends[at]]))


def since_first(events: Events) -> Events:
    """The same events with times of the calendar counted from the first of them."""
    is_finite = np.isfinite(events.minute)
    if not events.is_clock or not is_finite.any():
        return replace(events, is_clock=False)
    return replace(events, minute=events.minute - events.minute[is_finite].min(), is_clock=False)


def events_of(
    table: ColumnTable, columns: ColumnConfig, *, is_long: bool, valued: Collection[str] | None = None
) -> Events:
    """The rows of a table as events. `valued` are variables that have a value elsewhere; by default those of the table."""
    shape = shape_of(columns, table.columns, is_long=is_long)
    times = read_times(table.need(shape.time, setting="columns.time"), unit_minutes=columns.unit_minutes)
    variable = read_names(table.need(shape.variable, setting="columns.variable"))
    name = columns.value if shape.needs_values else shape.value
    value = (
        np.full(len(times.minute), np.nan) if name is None else read_numbers(table.need(name, setting="columns.value"))
    )
    variable = variable if not shape.prefix else np.array([f"{shape.prefix}{one}" for one in variable], dtype=object)
    if not shape.needs_values:
        variable, value = name_valueless(variable, value, valued)
    patient = read_names(table.need(shape.patient, setting="columns.patient")) if is_long else None
    label = table.columns.get(columns.label) if is_long else None
    return Events(
        path=table.path,
        rows=np.arange(len(times.minute)) + table.first_row,
        variable=variable,
        value=value,
        minute=times.minute,
        set_index=_set_index(table, columns.set_index),
        patient=patient,
        label=None if label is None else np.array(label.to_pylist(), dtype=object),
        is_carried="is_carry" in table.columns,
        is_clock=times.is_clock,
    )


def name_valueless(
    variable: NDArray[Any], value: NDArray[np.float64], valued: Collection[str] | None
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Events without a value become events of value 1: what counts is that they happened.

    Where their variable has values elsewhere, they get a name of their own.
    """
    is_missing = np.isnan(value)
    if not is_missing.any():
        return variable, value
    known = set(variable[~is_missing].tolist()) if valued is None else valued
    named = variable.copy()
    named[is_missing] = [f"{name}{VALUELESS}" if name in known else name for name in variable[is_missing]]
    return named, np.where(is_missing, 1.0, value)


def read_names(column: Any) -> NDArray[Any]:
    """Names; whole numbers are written without a decimal point, a missing one is empty."""
    return np.array([_name(value) for value in column.to_pylist()], dtype=object)


def _name(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _set_index(table: ColumnTable, name: str) -> Ints | None:
    if name not in table.columns:
        return None
    numbers = read_numbers(table.columns[name])
    wrong = np.flatnonzero(~(np.abs(numbers) < 2**53))  # NaN too
    if len(wrong):
        raise DataError(
            f"{table.path} row {int(wrong[0])}: an event without a set",
            seen=f"{name}={table.columns[name][int(wrong[0])].as_py()!r}",
            do=f"number every set, or leave the column {name!r} out: events of one time are then a set",
        )
    return numbers.astype(np.int64)
