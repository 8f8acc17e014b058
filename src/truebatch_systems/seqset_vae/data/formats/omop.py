"""OMOP: a folder with measurement, observation, condition_occurrence and others, one CSV or Parquet file each.

An event is a concept at a time, with a value where the table has one; names begin with the table. Age and gender come
from person. A patient is a person, or a visit: `columns.patient=visit_occurrence_id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from truebatch.errors import DataError
from truebatch_systems.seqset_vae.config import ColumnConfig
from truebatch_systems.seqset_vae.data.event_tables import Events, events_of, read_names, since_first
from truebatch_systems.seqset_vae.data.formats.shapes import OMOP_TABLES, omop_shape
from truebatch_systems.seqset_vae.data.formats.tables import TABLES, header_of, read_table, table_kind
from truebatch_systems.seqset_vae.data.formats.times import read_numbers

PERSON = "person"
AGE, GENDER = "person//age", "person//gender_concept_id"


def find_tables(folder: Path) -> dict[str, Path]:
    """Name of a table of OMOP -> its file; empty where there is no table of events."""
    known = {name for name, *_ in OMOP_TABLES}
    files = {
        file.name.lower().removesuffix(table_kind(file)): file for file in sorted(folder.iterdir()) if file.is_file()
    }
    found = {name: file for name, file in files.items() if name in {*known, PERSON} and table_kind(file) in TABLES}
    return found if known & set(found) else {}


def read_patients(tables: dict[str, Path], columns: ColumnConfig) -> Iterator[tuple[str, Events]]:
    """The events of every patient from all tables, in order of time."""
    person = _read_person(tables.get(PERSON))
    parts: dict[str, list[tuple[Events, str]]] = {}
    for name, *_ in OMOP_TABLES:
        if name in tables:
            for patient, events, who in _read_events(tables[name], columns):
                parts.setdefault(patient, []).append((events, who))
    for patient in sorted(parts):
        yield patient, since_first(_joined(parts[patient], person))


def _read_events(path: Path, columns: ColumnConfig) -> Iterator[tuple[str, Events, str]]:
    """Patient, events, and the person it is."""
    header = header_of(path)
    shape = omop_shape(columns, header)
    if shape is None:
        name = path.name.removesuffix(table_kind(path))
        raise DataError(
            f"{path} has not the columns of {name} in OMOP",
            seen=", ".join(header[:8]) + (f" and {len(header) - 8:,} more" if len(header) > 8 else ""),
            do="give it person_id, its concept and its time, or take the file out of the folder",
        )
    table = read_table(path, texts=[shape.patient, shape.variable, "person_id"])
    events = events_of(table, columns, is_long=True)
    assert events.patient is not None
    persons = read_names(table.columns["person_id"])
    names, code = np.unique(events.patient, return_inverse=True)
    order = np.argsort(code, kind="stable")
    for name, places in zip(names.tolist(), np.split(order, np.cumsum(np.bincount(code))[:-1]), strict=True):
        if name:
            yield name, events.take(places), str(persons[places[0]])


def _read_person(path: Path | None) -> dict[str, tuple[float, float]]:
    """Person -> year of birth and gender."""
    if path is None:
        return {}
    table = read_table(path, texts=["person_id"])
    persons = read_names(table.need("person_id", setting="columns.patient"))
    missing = np.full(len(persons), np.nan)
    born, gender = (
        read_numbers(table.columns[name]) if name in table.columns else missing
        for name in ("year_of_birth", "gender_concept_id")
    )
    return {str(who): (float(b), float(g)) for who, b, g in zip(persons, born, gender, strict=True)}


def _joined(parts: list[tuple[Events, str]], person: dict[str, tuple[float, float]]) -> Events:
    first, who = parts[0]
    columns: dict[str, list[Any]] = {
        name: [getattr(events, name) for events, _ in parts] for name in ("rows", "variable", "value", "minute")
    }
    minute = np.concatenate(columns["minute"])
    start = float(minute[np.isfinite(minute)].min()) if np.isfinite(minute).any() else 0.0
    born, gender = person.get(who, (np.nan, np.nan))
    year = 1970 + start / (365.25 * 24 * 60)
    for name, value in ((AGE, year - born), (f"{GENDER} {gender:g}", gender if np.isnan(gender) else 1.0)):
        if np.isfinite(value):
            columns["rows"].append(np.array([first.rows[0]]))
            columns["variable"].append(np.array([name], dtype=object))
            columns["value"].append(np.array([value]))
            columns["minute"].append(np.array([start]))
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    order = np.argsort(joined["minute"], kind="stable")
    return replace(
        first, patient=None, label=None, set_index=None, rows=joined["rows"][order], value=joined["value"][order],
        variable=joined["variable"][order], minute=joined["minute"][order],
    )  # fmt: skip
