"""Folders of stays as users have them, written row by row, with or without faults."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

Row = tuple[str, float | None, float | None]
"""Variable, value, minute."""

CLEAN: dict[str, list[Row]] = {
    f"{200001 + i}.0": [
        ("HR", 80.0 + i, 0.0),
        ("SBP", 120.0 - i, 0.0),
        ("HR", 85.0 + i, 30.0),
        ("Lactate", 2.0 + i, 95.0),
    ]
    for i in range(6)
}


def write_stay(path: Path, rows: Sequence[Row], **more: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "variable": pyarrow.array([r[0] for r in rows], pyarrow.string()),
        "value": pyarrow.array([r[1] for r in rows], pyarrow.float64()),
        "minute": pyarrow.array([r[2] for r in rows], pyarrow.float64()),
        **{name: pyarrow.array(list(column)) for name, column in more.items()},
    }
    parquet.write_table(pyarrow.table(columns), path)
    return path


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def write_folder(
    root: Path,
    stays: Mapping[str, Sequence[Row]] = CLEAN,
    *,
    labels: Mapping[str, Any] | None = None,
    std: Mapping[str, Any] | None = None,
) -> Path:
    """The whole layout: four stays to train on, one to validate, one to test."""
    splits = ["train"] * 4 + ["valid", "test"]
    for split, (name, rows) in zip(splits, stays.items(), strict=True):
        write_stay(root / "patient_ehr" / split / f"{name}.parquet", rows)
    names = ["HR", "SBP", "Lactate", "Age"]
    write_csv(root / "cached.csv", ["Key", "0", "1", "2"], [[n, i, 1.0, -i] for i, n in enumerate(names)])
    deviations = {"HR": 10.0, "SBP": 20.0, "Lactate": 20.0, "Age": 15.0} | dict(std or {})
    write_csv(root / "stats.csv", ["variable", "mean", "std"], [[n, 50.0, deviations[n]] for n in names])
    given = {name.removesuffix(".0"): i % 2 for i, name in enumerate(stays)} if labels is None else labels
    write_csv(
        root / "oc.csv", ["ts_id", "length_of_stay", "in_hospital_mortality"], [[n, 3, v] for n, v in given.items()]
    )
    return root
