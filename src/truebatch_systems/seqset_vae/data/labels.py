"""Labels of stays: read from a table, and stays shared out to training, validation and test by them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from truebatch.planning.rows import Ints
from truebatch_systems.seqset_vae.config import ColumnConfig
from truebatch_systems.seqset_vae.data.admissions import UNLABELLED
from truebatch_systems.seqset_vae.data.faults import Findings
from truebatch_systems.seqset_vae.data.formats.shapes import label_columns
from truebatch_systems.seqset_vae.data.formats.tables import header_of, read_table

Labels = dict[str, int]

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)


def stay_key(name: object) -> str:
    """The name of a stay as labels know it: file stems say 200001.0 where tables say 200001."""
    return str(name).strip().removesuffix(".0")


def read_labels(path: Path, columns: ColumnConfig, findings: Findings, *, num_classes: int = 2) -> Labels:
    """Stay -> class, from a table with one row a stay."""
    patient, label = label_columns(columns, header_of(path))
    table = read_table(path, texts=[patient, label])
    names = table.need(patient, setting="columns.label_patient").to_pylist()
    values = table.need(label, setting="columns.label").to_pylist()
    mark = ":" if table.first_row else " row "
    found: Labels = {}
    for at, (name, value) in enumerate(zip(names, values, strict=True), start=table.first_row):
        number = parse_label(value, f"{path}{mark}{at}", findings, num_classes=num_classes)
        if number != UNLABELLED:
            found[stay_key(name)] = number
    return found


def parse_label(value: Any, place: str, findings: Findings, *, num_classes: int = 2) -> int:
    """A class, or -1 for an empty cell; anything else is a fault that names its place."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return UNLABELLED
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (number.is_integer() and 0 <= number < num_classes):
        findings.note("bad_label", place, seen=f"{value!r}, classes are 0 to {num_classes - 1}")
        return UNLABELLED
    return int(number)


def label_stays(names: Sequence[str], labels: Mapping[str, int], place: str, findings: Findings) -> Ints:
    """[N] the class of every stay; one without is counted and gets -1."""
    found = np.array([labels.get(stay_key(name), UNLABELLED) for name in names], dtype=np.int64)
    for at in np.flatnonzero(found == UNLABELLED).tolist():
        findings.note("missing_label", place, seen=f"stay {names[at]!r}")
    return found


def share_out(
    names: Sequence[str], labels: Ints, *, validation: float, test: float, seed: int = 0
) -> dict[str, list[int]]:
    """Places of the stays of each split; every class is shared out alike.

    Which of two stays comes first is decided by their names and the seed alone. No patient is in two splits.
    """
    shares: dict[str, list[int]] = {name: [] for name in SPLITS}
    keys = np.array([_hash(name, seed) for name in names], dtype=np.uint64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(keys[members], kind="stable")]
        cuts = [round(test * len(members)), round((test + validation) * len(members))]
        for name, part in zip((TEST, VALIDATION, TRAIN), np.split(members, cuts), strict=True):
            shares[name] += part.tolist()
    return {name: sorted(part) for name, part in shares.items()}


def _hash(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")
