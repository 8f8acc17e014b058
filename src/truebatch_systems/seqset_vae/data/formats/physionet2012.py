"""PhysioNet/CinC 2012: a text file for each stay with `Time,Parameter,Value`, and one table of outcomes.

FOLDER/set-a/132539.txt    Time,Parameter,Value: 00:00,RecordID,132539 and then what was charted, hh:mm since admission
FOLDER/Outcomes-a.txt      RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from truebatch.errors import DataError
from truebatch.io.text_encoding import open_file
from truebatch_systems.seqset_vae.data.event_tables import Events
from truebatch_systems.seqset_vae.data.faults import Findings
from truebatch_systems.seqset_vae.data.formats.shapes import PHYSIONET_2012
from truebatch_systems.seqset_vae.data.formats.tables import header_of

RECORD = "RecordID"
DESCRIPTORS = ("Age", "Gender", "Height", "ICUType", "Weight")
"""Of these a value of -1 says that nobody knows it."""
ICU_TYPE = "ICUType"
OUTCOMES = "Outcomes*.txt"
MOST_BYTES = 32 << 20
"""Of a stay; those of the challenge have 20 kB at most."""


def find_records(folder: Path) -> list[Path]:
    """The stays of a folder, or of the one folder in it that holds some; none where it holds other files."""
    for place in (folder, *sorted(p for p in folder.iterdir() if p.is_dir())):
        files = sorted(file for file in place.glob("*.txt") if file.stem.isdigit())
        if files and tuple(header_of(files[0])) == PHYSIONET_2012:
            return files
    return []


def find_outcomes(folder: Path) -> Path | None:
    """The table of outcomes in the folder of the stays, or beside it: of several, that of the same letter."""
    found = [*sorted(folder.glob(OUTCOMES)), *sorted(folder.parent.glob(OUTCOMES))]
    same = [path for path in found if path.stem[-2:] == folder.name[-2:]]
    return next(iter([*same, *found]), None)


def read_records(files: list[Path], findings: Findings) -> Iterator[tuple[str, Events]]:
    """The name and events of every stay."""
    for file in files:
        yield file.stem, read_record(file, findings)


def read_record(file: Path, findings: Findings) -> Events:
    """The events of one stay: without its number, without unknown descriptors; a unit is an event of its own."""
    rows, minutes, names, values = [], [], [], []
    with open_file(file) as raw:
        content = raw.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DataError(
            f"{file} is too large for one stay", seen=f"more than {MOST_BYTES:,} bytes", do="write one stay per file"
        )
    lines = content.decode("utf-8-sig", errors="replace").splitlines()
    if not lines or tuple(lines[0].strip().split(",")) != PHYSIONET_2012:
        raise DataError(
            f"{file} is no stay of PhysioNet 2012",
            seen=repr(lines[0][:60]) if lines else "an empty file",
            do=f"begin it with {','.join(PHYSIONET_2012)}",
        )
    for number, row in enumerate(csv.reader(lines[1:]), start=2):
        if not row:
            continue
        time, name, value = [*row, "", "", ""][:3]
        if name == RECORD:
            continue
        number_of = _number(value)
        if name in DESCRIPTORS and number_of == -1:
            findings.note("not_known", f"{file}:{number}", seen=f"{name} -1")
            continue
        if name == ICU_TYPE and np.isfinite(number_of):  # Four units, and no order among them.
            name, number_of = f"{ICU_TYPE} {number_of:g}", 1.0
        rows.append(number)
        minutes.append(_minutes(time))
        names.append(name)
        values.append(number_of)
    return Events(
        path=file,
        rows=np.array(rows, dtype=np.int64),
        variable=np.array(names, dtype=object),
        value=np.array(values, dtype=np.float64),
        minute=np.array(minutes, dtype=np.float64),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _minutes(text: str) -> float:
    hours, _, minutes = text.strip().partition(":")
    return 60.0 * _number(hours) + _number(minutes) if minutes else float("nan")
