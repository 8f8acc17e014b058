"""MEDS: a folder of Parquet shards with one event a row, its splits, and tasks that say until when a patient is known.

DATASET/data/**/*.parquet               subject_id, time, code, numeric_value, ...
DATASET/metadata/subject_splits.parquet subject_id, split (train, tuning, held_out)
DATASET/tasks/*.parquet                 subject_id, prediction_time, boolean_value

The birth of a patient becomes the age in years at the first event; events without a time happened before everything
else, those without a value count as having happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import DataError
from truebatch_systems.seqset_vae.config import ColumnConfig
from truebatch_systems.seqset_vae.data.event_tables import Events, events_of, read_names, since_first
from truebatch_systems.seqset_vae.data.formats.shapes import MEDS
from truebatch_systems.seqset_vae.data.formats.tables import header_of, read_table
from truebatch_systems.seqset_vae.data.formats.times import read_numbers, read_times
from truebatch_systems.seqset_vae.data.labels import TEST, TRAIN, VALIDATION

BIRTH, AGE = "MEDS_BIRTH", "age in years"
SPLIT_NAMES = {"train": TRAIN, "tuning": VALIDATION, "held_out": TEST}
SPLITS_FILE = "metadata/subject_splits.parquet"
YEAR_MINUTES = 365.25 * 24 * 60
COLUMNS = (MEDS.patient, MEDS.time, MEDS.variable, "numeric_value")
AT = "@"


@dataclass(frozen=True, slots=True, eq=False)
class MedsDataset:
    """The files of a dataset."""

    root: Path
    shards: tuple[Path, ...]
    tasks: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One row of a task: a patient, until when events are known, and the answer."""

    subject: str
    until: float
    """Minutes of the calendar; infinite without a time."""
    label: int | None
    place: str


def find_dataset(folder: Path) -> MedsDataset | None:
    """The dataset in a folder, which may be its `data` too; None where there is none."""
    root = folder.parent if folder.name == "data" and (folder.parent / "metadata").is_dir() else folder
    data = root / "data" if (root / "data").is_dir() else folder
    shards = tuple(sorted(data.rglob("*.parquet")))
    if not shards or not {MEDS.patient, MEDS.time, MEDS.variable} <= set(header_of(shards[0])):
        return None
    tasks = tuple(sorted((root / "tasks").rglob("*.parquet"))) if (root / "tasks").is_dir() else ()
    return MedsDataset(root, shards, tasks)


def splits_of(dataset: MedsDataset) -> dict[str, str]:
    """Patient -> split, from the table of splits, else from the folders of the shards; empty where neither says it."""
    path = dataset.root / SPLITS_FILE
    if path.is_file():
        table = read_table(path)
        subjects, names = (read_names(table.need(name, setting="data")) for name in (MEDS.patient, "split"))
        return {
            subject: SPLIT_NAMES[name] for subject, name in zip(subjects, names, strict=True) if name in SPLIT_NAMES
        }
    found: dict[str, str] = {}
    for shard in dataset.shards:
        if shard.parent.name in SPLIT_NAMES:
            table = read_table(shard, columns=[MEDS.patient])
            subjects = np.unique(read_names(table.need(MEDS.patient, setting="columns.patient")))
            found |= dict.fromkeys(subjects.tolist(), SPLIT_NAMES[shard.parent.name])
    return found


def read_questions(path: Path, columns: ColumnConfig) -> list[Question]:
    """The rows of a task: its label is `columns.label` where there is such a column, else the one that has values."""
    found = []
    for file in sorted(path.rglob("*.parquet")) if path.is_dir() else [path]:
        table = read_table(file)
        subjects = read_names(table.need(MEDS.patient, setting="columns.label_patient"))
        times = table.columns.get("prediction_time")
        until = read_times(times, unit_minutes=1.0).minute if times is not None else np.full(len(subjects), np.inf)
        values = _labels(table.columns, columns, file)
        for at, subject in enumerate(subjects.tolist()):
            label = None if np.isnan(values[at]) else int(values[at])
            found.append(Question(subject, float(until[at]), label, f"{file} row {at}"))
    return found


def _labels(columns: Mapping[str, Any], config: ColumnConfig, file: Path) -> NDArray[np.float64]:
    names = [config.label, "boolean_value", "integer_value", "categorical_value", "float_value"]
    for name in (name for name in names if name in columns):
        values = read_numbers(columns[name])
        if np.isfinite(values).any():
            return values
    raise DataError(
        f"{file} holds no labels",
        seen=f"columns {', '.join(columns)}",
        do="give boolean_value or integer_value, or name the column: --set columns.label=...",
    )


def read_patients(dataset: MedsDataset, columns: ColumnConfig) -> Iterator[tuple[str, Events]]:
    """The events of every patient, times of the calendar; shard after shard, each patient in one of them."""
    seen: dict[str, Path] = {}
    valued = _valued_codes(dataset)
    for shard in dataset.shards:
        events = events_of(read_table(shard, columns=COLUMNS), columns, is_long=True, valued=valued)
        assert events.patient is not None
        names, code = np.unique(events.patient, return_inverse=True)
        order = np.argsort(code, kind="stable")
        for name, places in zip(names.tolist(), np.split(order, np.cumsum(np.bincount(code))[:-1]), strict=True):
            if name in seen:
                raise DataError(
                    f"patient {name} is in two shards",
                    seen=f"{seen[name]} and {shard}",
                    do="write every patient into one shard, as MEDS asks for",
                )
            seen[name] = shard
            yield name, events.take(places)


def _valued_codes(dataset: MedsDataset) -> set[str]:
    """Codes that have a value anywhere, so that a code is called the same in every shard."""
    import pyarrow

    found: set[str] = set()
    for shard in dataset.shards:
        table = read_table(shard, columns=(MEDS.variable, "numeric_value"))
        codes = table.need(MEDS.variable, setting="columns.variable")
        if "numeric_value" in table.columns:
            is_valued = np.isfinite(read_numbers(table.columns["numeric_value"]))
            found |= set(codes.filter(pyarrow.array(is_valued)).unique().to_pylist())
    return found


def known_until(events: Events, until: float) -> Events:
    """What is known of a patient at a time, counted from the first event after birth."""
    is_birth = events.variable == BIRTH
    is_static = np.isnan(events.minute)
    is_known = is_static | (events.minute <= until)
    rest = np.flatnonzero(is_known & ~is_birth & ~is_static)
    first = float(events.minute[rest].min()) if len(rest) else float("nan")
    minute = np.where(is_static | is_birth, first if len(rest) else 0.0, events.minute)
    born = events.minute[is_birth]
    age = (first - born[0]) / YEAR_MINUTES if len(born) and np.isfinite(born[0]) else float("nan")
    keep = is_known if np.isfinite(age) else is_known & ~is_birth
    events = replace(
        events,
        minute=minute,
        value=np.where(is_birth, age, events.value),
        variable=np.where(is_birth, AGE, events.variable),
    ).take(np.flatnonzero(keep))
    return since_first(events.take(np.argsort(events.minute, kind="stable")))


def questions_by_patient(questions: list[Question]) -> dict[str, list[tuple[str, Question]]]:
    """Patient -> the samples asked about, by their ids: the patient, with the number of the question where there are more."""
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.subject, []).append(question)
    return {
        subject: [(subject if len(rows) == 1 else f"{subject}{AT}{k}", row) for k, row in enumerate(rows)]
        for subject, rows in found.items()
    }
