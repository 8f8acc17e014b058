"""Bad data: every fault has its documented outcome, names file and row, and none passes in silence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.systems.seqset_vae.folders import CLEAN, Row, write_csv, write_folder, write_stay
from truebatch.errors import DataError
from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import NOTHING
from truebatch_systems.seqset_vae.data.faults import KINDS
from truebatch_systems.seqset_vae.data.prepare import prepare

FIRST = "200001.0"


def with_rows(change: Callable[[list[Row]], list[Row]]) -> dict[str, list[Row]]:
    return {**CLEAN, FIRST: change(list(CLEAN[FIRST]))}


FAULTS: dict[str, dict[str, Any]] = {
    "unknown_variable": {
        "stays": with_rows(lambda rows: [*rows, ("HRx", 1.0, 99.0)]),
        "stops": True,
        "place": f"{FIRST}.parquet row 4",
        "seen": "variable 'HRx'",
    },
    "not_finite": {
        "stays": with_rows(lambda rows: [*rows[:2], ("HR", math.nan, 20.0), *rows[2:]]),
        "stops": True,
        "place": f"{FIRST}.parquet row 2",
        "seen": "nan",
    },
    "bad_time": {
        "stays": with_rows(lambda rows: [*rows, ("HR", 70.0, None)]),
        "stops": True,
        "place": f"{FIRST}.parquet row 4",
        "seen": "nan",
    },
    "negative_minute": {
        "stays": with_rows(lambda rows: [("Age", 60.0, -5.0), *rows]),
        "stops": False,
        "place": f"{FIRST}.parquet row 0",
        "seen": "minute -5",
    },
    "unsorted": {
        "stays": with_rows(lambda rows: [rows[3], *rows[:3]]),
        "stops": False,
        "place": f"{FIRST}.parquet row 1",
        "seen": "minute 0 after minute 95",
    },
    "duplicate": {
        "stays": with_rows(lambda rows: [rows[0], ("HR", 99.0, 0.0), *rows[1:]]),
        "stops": False,
        "place": f"{FIRST}.parquet row 1",
        "seen": "variable 'HR' at minute 0",
    },
    "empty": {
        "stays": with_rows(lambda rows: []),
        "stops": False,
        "place": f"{FIRST}.parquet",
        "seen": f"stay '{FIRST}' has no events",
    },
    "missing_label": {
        "labels": {f"{200002 + i}": 1 for i in range(5)},
        "stops": False,
        "place": "oc.csv",
        "seen": f"stay '{FIRST}'",
    },
    "zero_std": {"std": {"SBP": 0.0}, "stops": False, "place": "stats.csv:3", "seen": "variable 'SBP', std '0.0'"},
    "a deviation that is no number": {
        "std": {"HR": "x"},
        "stops": True,
        "place": "stats.csv:2, column 'std' is not a finite number",
        "seen": "'x'",
    },
    "bad_label": {
        "labels": {f"{200001 + i}": 7 if i == 2 else 1 for i in range(6)},
        "stops": True,
        "place": "oc.csv:4",
        "seen": "'7', classes are 0 to 1",
    },
}


def written(folder: Path, fault: str) -> SeqSetConfig:
    parts = {k: v for k, v in FAULTS[fault].items() if k in ("stays", "labels", "std")}
    return SeqSetConfig(data=str(write_folder(folder, **parts)))


@pytest.mark.parametrize("fault", [name for name in FAULTS if FAULTS[name]["stops"]])
def test_a_fault_that_cannot_be_corrected_stops_and_names_file_and_row(fault, tmp_path):
    with pytest.raises(DataError) as raised:
        prepare(written(tmp_path, fault))
    assert FAULTS[fault]["place"] in raised.value.wrong
    assert FAULTS[fault]["seen"] in raised.value.seen
    assert raised.value.do


@pytest.mark.parametrize("fault", [name for name in FAULTS if not FAULTS[name]["stops"]])
def test_a_fault_that_is_corrected_is_counted_with_its_place_and_stops_a_strict_run(fault, tmp_path):
    config = written(tmp_path, fault)
    lines = [line for line in prepare(config).lines if line.startswith(KINDS[fault].words)]
    assert len(lines) == 1
    assert FAULTS[fault]["place"] in lines[0]
    assert FAULTS[fault]["seen"] in lines[0]
    assert ": 1 (in 1 places" in lines[0]
    strict = SeqSetConfig(data=config.data, strict=True)
    with pytest.raises(DataError, match="leave strict out") as raised:
        prepare(strict)
    assert FAULTS[fault]["place"] in raised.value.wrong


@pytest.mark.parametrize("fault", ["unknown_variable", "not_finite", "bad_time"])
def test_events_that_cannot_be_read_are_left_out_only_where_asked_and_counted(fault, tmp_path):
    config = written(tmp_path, fault)
    ready = prepare(SeqSetConfig(data=config.data, drop_faulty=True))
    assert any(line.startswith(KINDS[fault].words) and "the event is left out" in line for line in ready.lines)
    clean = prepare(SeqSetConfig(data=str(write_folder(tmp_path / "clean"))))
    for name in ("var", "val", "set_minute", "set_size"):
        np.testing.assert_array_equal(ready.train[0][name], clean.train[0][name])


def test_clean_stays_have_no_faults_to_report(tmp_path):
    lines = prepare(SeqSetConfig(data=str(write_folder(tmp_path)))).lines
    assert lines == (
        "train: 4 stays, 12 sets, 16 events; 50.0% of 4 labels are 1",
        "validation: 1 stays, 3 sets, 4 events; 0.0% of 1 labels are 1",
        "test: 1 stays, 3 sets, 4 events; 100.0% of 1 labels are 1",
        "variables: 4",
    )


def corrected(folder: Path, fault: str) -> dict[str, Any]:
    ready = prepare(written(folder, fault))
    return {**ready.train[0], "names": [ready.variables.names[v] for v in ready.train[0]["var"]]}


def test_what_the_corrections_make_of_a_stay(tmp_path):
    early = corrected(tmp_path / "a", "negative_minute")
    assert early["set_minute"].tolist() == [0.0, 30.0, 95.0]
    assert sorted(early["names"][:3]) == ["Age", "HR", "SBP"]
    unsorted = corrected(tmp_path / "b", "unsorted")
    assert unsorted["names"] == ["HR", "SBP", "HR", "Lactate"]
    twice = corrected(tmp_path / "c", "duplicate")
    assert twice["set_size"].tolist() == [2, 1, 1]
    assert twice["val"][0] == pytest.approx((99 - 50) / 10)
    nothing = corrected(tmp_path / "d", "empty")
    assert (nothing["var"].tolist(), nothing["val"].tolist(), nothing["set_size"].tolist()) == ([NOTHING], [0.0], [1])
    unlabelled = corrected(tmp_path / "e", "missing_label")
    assert unlabelled["label"] == -1
    flat = corrected(tmp_path / "f", "zero_std")
    assert flat["val"][1] == 10.0  # 120 - 50 + 1 deviations, cut to the limit.


def test_a_variable_without_statistics_is_counted_and_left_as_it_is(tmp_path):
    write_folder(tmp_path)
    write_csv(tmp_path / "stats.csv", ["variable", "mean", "std"], [["HR", 50, 10], ["SBP", 50, 20]])
    ready = prepare(SeqSetConfig(data=str(tmp_path)))
    line = next(line for line in ready.lines if line.startswith(KINDS["no_statistics"].words))
    assert "2 (in 1 places" in line
    assert "stats.csv: Lactate, Age" in line
    assert ready.train[0]["val"][-1] == 2.0


def test_a_set_with_two_times_stops(tmp_path):
    write_folder(tmp_path)
    path = tmp_path / "patient_ehr" / "train" / f"{FIRST}.parquet"
    write_stay(path, CLEAN[FIRST], set_index=[0, 0, 0, 1])
    with pytest.raises(DataError, match=r"row 2: a set with two times\n  seen: set_index 0: minute 0 and minute 30"):
        prepare(SeqSetConfig(data=str(tmp_path)))


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    write_folder(tmp_path)
    path = tmp_path / "patient_ehr" / "train" / f"{FIRST}.parquet"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=rf"{FIRST}\.parquet cannot be read as Parquet; it is empty\n  seen: 0 bytes"):
        prepare(SeqSetConfig(data=str(tmp_path)))
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=rf"{FIRST}\.parquet cannot be read as Parquet\n"):
        prepare(SeqSetConfig(data=str(tmp_path)))
