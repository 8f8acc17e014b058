"""Tables as they come from registries: timestamps, MEDS, OMOP, PhysioNet 2012, and values far from all others."""

from __future__ import annotations

import gzip
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.systems.seqset_vae.folders import write_csv
from truebatch.cli.app import run
from truebatch.errors import DataError
from truebatch_systems.seqset_vae.config import ColumnConfig, ModelConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.formats.times import read_numbers, read_times
from truebatch_systems.seqset_vae.data.prepare import PreparedStays, prepare

SMALL = ModelConfig(embedding_dim=8)
ALL = {"validation_share": 0.0, "test_share": 0.0, "model": SMALL}
START = datetime(2130, 3, 1, 8, 0)


def first_sample(ready: PreparedStays, split: str = "train") -> dict[str, Any]:
    sample = ready.splits[split][0]
    return {**sample, "names": [ready.variables.names[v] for v in sample["var"]]}


@pytest.mark.parametrize(
    ("values", "minutes", "is_clock"),
    [
        (["00:00", "00:07", "47:55", "x", ""], [0, 7, 2875, np.nan, np.nan], False),
        (["1:02:30"], [62.5], False),
        (["12", " 3.5", "", "one"], [12, 3.5, np.nan, np.nan], False),
        (["1970-01-01", "1970-01-01 00:05", "1970-01-01T01:00:30", "soon"], [0, 5, 60.5, np.nan], True),
        (["1970-01-01T01:00:00Z", "1970-01-01T02:00:00+02:00", "1969-12-31T23:00:00.000-01:00"], [60, 0, 0], True),
        ([datetime(1970, 1, 1, 3), None], [180, np.nan], True),
        ([timedelta(hours=2)], [120], False),
        ([1, None, 2], [1, np.nan, 2], False),
    ],
)
def test_times_are_read_however_they_are_written(values, minutes, is_clock):
    found = read_times(pyarrow.array(values), unit_minutes=1.0)
    np.testing.assert_allclose(found.minute, minutes)
    assert found.is_clock is is_clock


def test_what_is_no_number_becomes_a_missing_one():
    found = read_numbers(pyarrow.array(["1", "-2.5e1", "<5", "", None, " 7 "]))
    np.testing.assert_array_equal(found, [1, -25, np.nan, np.nan, np.nan, 7])


@pytest.mark.parametrize("kind", ["iso", "datetime64", "gz"])
def test_a_long_table_with_timestamps_counts_from_the_first_event_of_each_patient(tmp_path, kind):
    events = [(who, START + timedelta(days=9 * who, minutes=m), "NA", m) for who in (1, 2) for m in (30, 0, 95)]
    names = ["patient", "minute", "variable", "value"]
    path = tmp_path / "events.csv"
    if kind == "datetime64":
        path = tmp_path / "events.parquet"
        parquet.write_table(pyarrow.table(dict(zip(names, map(list, zip(*events, strict=True)), strict=True))), path)
    else:
        write_csv(path, names, [[who, when.isoformat(" "), what, value] for who, when, what, value in events])
    if kind == "gz":
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = Path(f"{path}.gz")
    ready = prepare(SeqSetConfig(data=str(path), **ALL))
    assert ready.train.ids == ("1", "2")
    assert [ready.train[i]["set_minute"].tolist() for i in (0, 1)] == [[0.0, 30.0, 95.0]] * 2
    assert ready.variables.names[1:] == ("NA",)  # Sodium, and no missing value.


def test_a_time_that_nobody_can_read_is_a_fault_with_its_line(tmp_path):
    rows = [[1, "2130-03-01 08:00", "HR", 1], [1, "yesterday", "HR", 2]]
    path = write_csv(tmp_path / "events.csv", ["patient", "minute", "variable", "value"], rows)
    with pytest.raises(DataError, match=r"events\.csv:3: an event without a finite time"):
        prepare(SeqSetConfig(data=str(path), **ALL))


def write_meds(root: Path, *, tasks: bool = True, splits: bool = True) -> Path:
    """Four patients in two shards: born forty years before, with a static code, values, and codes without one."""
    rows: dict[str, list[Any]] = {name: [] for name in ("subject_id", "time", "code", "numeric_value", "text_value")}
    shards = {"train/0": [1, 2], "held_out/0": [3, 4]}
    for shard, subjects in shards.items():
        rows = {name: [] for name in rows}
        for who in subjects:
            events = [
                (None, "GENDER//F", None), (START - timedelta(days=40 * 365.25), "MEDS_BIRTH", None),
                (START, "HR", 80.0 + who), (START, "ICD//I10", None), (START + timedelta(hours=1), "LAB", 1.5),
                (START + timedelta(hours=2), "LAB", None), (START + timedelta(hours=30), "MEDS_DEATH", None),
            ]  # fmt: skip
            for time, code, value in events:
                for name, cell in zip(rows, (who, time, code, value, "x"), strict=True):
                    rows[name].append(cell)
        path = root / "data" / f"{shard}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        schema = {"time": pyarrow.timestamp("us"), "numeric_value": pyarrow.float32()}
        parquet.write_table(pyarrow.table({n: pyarrow.array(v, schema.get(n)) for n, v in rows.items()}), path)
    (root / "metadata").mkdir()
    if splits:
        table = pyarrow.table({"subject_id": [1, 2, 3, 4], "split": ["train", "train", "tuning", "held_out"]})
        parquet.write_table(table, root / "metadata" / "subject_splits.parquet")
    if tasks:
        (root / "tasks").mkdir()
        until = [START + timedelta(hours=h) for h in (24, 24, 24, 1)]
        table = {"subject_id": [1, 2, 3, 4], "prediction_time": until, "boolean_value": [True, False, True, False]}
        parquet.write_table(pyarrow.table(table), root / "tasks" / "death.parquet")
    return root


def test_a_meds_folder_is_read_with_its_splits_and_nothing_after_the_question(tmp_path):
    ready = prepare(SeqSetConfig(data=str(write_meds(tmp_path / "meds")), model=SMALL))
    assert {split: stays.ids for split, stays in ready.splits.items()} == {
        "train": ("1", "2"), "validation": ("3",), "test": ("4",),
    }  # fmt: skip
    assert ready.train.labels.tolist() == [1, 0]
    sample = first_sample(ready)
    assert sample["names"] == ["GENDER//F", "age in years", "HR", "ICD//I10", "LAB", "LAB, no value"]
    assert sample["set_minute"].tolist() == [0.0, 60.0, 120.0]
    assert sample["set_size"].tolist() == [4, 1, 1]
    assert sample["val"][[0, 3, 5]].tolist() == [1.0, 1.0, 1.0]  # What happened, counts.
    assert first_sample(ready, "test")["set_minute"].tolist() == [0.0, 60.0]


def test_a_meds_folder_without_tasks_has_whole_patients_and_folders_say_the_split(tmp_path):
    ready = prepare(SeqSetConfig(data=str(write_meds(tmp_path / "meds", tasks=False, splits=False)), model=SMALL))
    assert {split: stays.ids for split, stays in ready.splits.items()} == {"train": ("1", "2"), "test": ("3", "4")}
    assert first_sample(ready)["set_minute"].tolist() == [0.0, 60.0, 120.0, 1800.0]
    assert ready.train.labels.tolist() == [-1, -1]
    with_task = write_meds(tmp_path / "other")
    none = prepare(SeqSetConfig(data=str(with_task), labels=Path("none"), model=SMALL))
    assert first_sample(none)["set_minute"].tolist() == [0.0, 60.0, 120.0, 1800.0]


def test_validate_of_a_meds_folder_says_what_is_in_it(tmp_path, capsys):
    assert run(["seqset_vae", "validate", str(write_meds(tmp_path / "meds"))]) == 0
    assert "train: 2 stays, 6 sets, 12 events; 50.0% of 2 labels are 1" in capsys.readouterr().out


def test_a_patient_in_two_shards_is_named(tmp_path):
    root = write_meds(tmp_path / "meds")
    first = root / "data" / "train" / "0.parquet"
    (root / "data" / "train" / "1.parquet").write_bytes(first.read_bytes())
    with pytest.raises(DataError, match="patient 1 is in two shards"):
        prepare(SeqSetConfig(data=str(root), model=SMALL))


def write_omop(root: Path) -> Path:
    write_csv(
        root / "measurement.csv",
        ["measurement_id", "person_id", "measurement_concept_id", "measurement_datetime", "value_as_number",
         "visit_occurrence_id"],
        [[1, 7, 3027018, "2130-03-01 08:00:00", 81, 70], [2, 7, 3027018, "2130-03-01 09:00:00", "", 70],
         [3, 8, 3027018, "2130-04-01 08:00:00", 92, 80], [4, 7, 3027018, "2130-05-01 08:00:00", 83, 71]],
    )  # fmt: skip
    write_csv(
        root / "condition_occurrence.csv",
        ["person_id", "condition_concept_id", "condition_start_date", "visit_occurrence_id"],
        [[7, 320128, "2130-03-02", 70], [8, 320128, "2130-04-02", 80]],
    )
    write_csv(
        root / "person.csv", ["person_id", "gender_concept_id", "year_of_birth"], [[7, 8507, 2090], [8, 8532, ""]]
    )
    write_csv(root / "labels.csv", ["person_id", "died"], [[7, 1], [8, 0]])
    return root


def test_tables_of_omop_become_patients_with_age_and_codes_without_values(tmp_path):
    root = write_omop(tmp_path / "omop")
    columns = ColumnConfig(label="died", label_patient="person_id")
    ready = prepare(SeqSetConfig(data=str(root), labels=root / "labels.csv", columns=columns, **ALL))
    assert (ready.train.ids, ready.train.labels.tolist()) == (("7", "8"), [1, 0])
    sample = first_sample(ready)
    assert sample["names"] == [
        "measurement//3027018", "person//age", "person//gender_concept_id 8507", "measurement//3027018, no value",
        "condition_occurrence//320128", "measurement//3027018",
    ]  # fmt: skip
    assert sample["set_minute"].tolist() == [0, 60, 16 * 60, 61 * 1440]
    by_visit = ColumnConfig(patient="visit_occurrence_id")
    assert prepare(SeqSetConfig(data=str(root), columns=by_visit, **ALL)).train.ids == ("70", "71", "80")


@pytest.mark.parametrize("header", ["a,b", ",".join(f"column{n}" for n in range(20_000))])
def test_a_table_of_omop_with_other_columns_is_named(tmp_path, header):
    (tmp_path / "measurement.csv").write_text(header + "\n")
    with pytest.raises(DataError, match=r"measurement.csv has not the columns of measurement"):
        prepare(SeqSetConfig(data=str(tmp_path), **ALL))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"code": [{"a": 1}, {"a": 2}]}, "'code' of .* holds lists or structures"),
        ({"time": [[1], [2]]}, "'time' of .* holds lists or structures"),
        ({"subject_id": [[1], [2]]}, "'subject_id' of .* holds lists or structures"),
        ({"code": None}, "has no column 'code'"),
        ({"subject_id": None}, "has no column 'subject_id'"),
    ],
)
def test_a_shard_of_other_columns_is_named(tmp_path, change, said):
    rows = {
        "subject_id": [1, 2],
        "time": np.array([0, 1], "datetime64[us]"),
        "code": ["a", "b"],
        "numeric_value": [1.0, 2.0],
    }
    (tmp_path / "data/train").mkdir(parents=True)
    parquet.write_table(pyarrow.table(rows), tmp_path / "data/train/0.parquet")
    rows = {name: column for name, column in {**rows, "subject_id": [3, 4], **change}.items() if column is not None}
    parquet.write_table(pyarrow.table(rows), tmp_path / "data/train/1.parquet")
    with pytest.raises(DataError, match=said):
        prepare(SeqSetConfig(data=str(tmp_path), **ALL))


def test_values_of_a_shard_may_be_written_as_text(tmp_path):
    rows = {
        "subject_id": [1, 2],
        "time": np.array([0, 1], "datetime64[us]"),
        "code": ["a", "b"],
        "numeric_value": ["7", "x"],
    }
    (tmp_path / "data/train").mkdir(parents=True)
    parquet.write_table(pyarrow.table(rows), tmp_path / "data/train/0.parquet")
    ready = prepare(SeqSetConfig(data=str(tmp_path), **ALL))
    assert "a" in ready.variables.names


def test_one_table_of_omop_is_a_long_table(tmp_path):
    root = write_omop(tmp_path / "omop")
    ready = prepare(SeqSetConfig(data=str(root / "measurement.csv"), **ALL))
    assert ready.train.ids == ("7", "8")
    assert first_sample(ready)["set_minute"].tolist() == [0, 60, 61 * 1440]


def write_physionet(root: Path, number: int = 6) -> Path:
    """Stays in exactly the form of set A."""
    folder = root / "set-a"
    folder.mkdir(parents=True)
    for i in range(number):
        lines = [
            "Time,Parameter,Value", f"00:00,RecordID,{132539 + i}", "00:00,Age,54", "00:00,Gender,0", "00:00,Height,-1",
            "00:00,ICUType,4", "00:00,Weight,-1", f"00:07,GCS,{15 - i}", "00:07,HR,73", "47:37,HR,86",
        ]  # fmt: skip
        (folder / f"{132539 + i}.txt").write_text("\n".join(lines) + "\n")
    outcomes = ["RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death"]
    outcomes += [f"{132539 + i},6,1,5,-1,{i % 2}" for i in range(number)]
    (root / "Outcomes-a.txt").write_text("\n".join(outcomes) + "\n")
    return root


@pytest.mark.parametrize("given", ["", "set-a"])
def test_set_a_of_physionet_2012_is_read_with_its_outcomes(tmp_path, given):
    root = write_physionet(tmp_path / "cinc")
    ready = prepare(SeqSetConfig(data=str(root / given), **ALL))
    assert ready.train.ids == tuple(str(132539 + i) for i in range(6))
    assert ready.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    sample = first_sample(ready)
    assert sample["names"] == ["Age", "Gender", "ICUType 4", "GCS", "HR", "HR"]
    assert sample["set_minute"].tolist() == [0, 7, 47 * 60 + 37]
    assert any(line.startswith("a descriptor that says it is not known: 12 ") for line in ready.lines)


def test_a_stay_of_physionet_2012_that_has_no_end_is_named(tmp_path):
    root = write_physionet(tmp_path)
    file = next(iter(sorted(root.rglob("1*.txt"))))
    with file.open("a") as opened:
        opened.truncate(8 << 30)
    with pytest.raises(DataError, match="too large for one stay"):
        prepare(SeqSetConfig(data=str(root), **ALL))


def rare(path: Path, *, held_out: float) -> PreparedStays:
    """A variable that training stays always have the same value of, and one held-out stay another."""
    rows = [[f"p{i}", 0, "HR", 70 + i % 9] for i in range(60)] + [[f"p{i}", 1, "rare", 2.0] for i in range(60)]
    first = prepare(
        SeqSetConfig(data=str(write_csv(path, ["patient", "minute", "variable", "value"], rows)), model=SMALL)
    )
    odd = first.validation.ids[0]
    rows = [[who, m, name, held_out if (who, name) == (odd, "rare") else value] for who, m, name, value in rows]
    return prepare(
        SeqSetConfig(data=str(write_csv(path, ["patient", "minute", "variable", "value"], rows)), model=SMALL)
    )


def test_a_held_out_value_of_a_constant_variable_is_cut_counted_and_said(tmp_path):
    ready = rare(tmp_path / "t.csv", held_out=1953.0)
    assert np.abs(ready.validation.val).max() == 10.0
    assert np.abs(ready.train.val).max() < 3.0
    line = next(line for line in ready.lines if line.startswith("a value farther from the mean"))
    assert "1 (in 1 places, first validation stays: variable 'rare', 1953; up to " in line
    unclipped = prepare(SeqSetConfig(data=str(tmp_path / "t.csv"), model=SMALL, clip=None))
    assert np.abs(unclipped.validation.val).max() > 1000


def test_a_single_wild_value_does_not_squeeze_all_others(tmp_path):
    rows = [[f"p{i}", 0, "pH", 7.3 + 0.01 * (i % 10)] for i in range(300)] + [["p0", 5, "pH", 735.0]]
    path = write_csv(tmp_path / "t.csv", ["patient", "minute", "variable", "value"], rows)
    usual = prepare(SeqSetConfig(data=str(path), **ALL)).train.val
    assert np.sort(np.abs(usual))[-2] < 2.0  # Deviations are those of the usual values,
    assert np.sort(usual)[150] == pytest.approx(0, abs=0.2)
    assert usual.max() == 10.0  # and the wild one is at the limit.
    assert usual[usual < 10].std() == pytest.approx(1, abs=0.1)
