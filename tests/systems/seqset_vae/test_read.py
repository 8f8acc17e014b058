"""Where stays come from: layouts of folders, tables beside them, splits, and real persons by name."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.systems.seqset_vae.folders import CLEAN, write_csv, write_folder, write_stay
from truebatch.errors import ConfigError, DataError
from truebatch_systems.seqset_vae.config import ColumnConfig, GeneratorConfig, ModelConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.labels import share_out
from truebatch_systems.seqset_vae.data.prepare import prepare

SMALL = ModelConfig(embedding_dim=8)


def test_the_folder_of_the_note_is_read_with_its_tables(tmp_path):
    ready = prepare(SeqSetConfig(data=str(write_folder(tmp_path))))
    assert {split: stays.ids for split, stays in ready.splits.items()} == {
        "train": ("200001.0", "200002.0", "200003.0", "200004.0"),
        "validation": ("200005.0",),
        "test": ("200006.0",),
    }
    assert ready.variables.names[1:] == ("HR", "SBP", "Lactate", "Age")
    assert ready.variables.vectors.shape == (5, 3)
    sample = ready.train[1]
    assert sample["label"] == 1
    assert sample["val"].tolist() == pytest.approx([(81 - 50) / 10, (119 - 50) / 20, (86 - 50) / 10, (3 - 50) / 20])
    assert sample["set_minute"].tolist() == [0.0, 30.0, 95.0]


def test_patient_ehr_itself_and_files_without_splits_are_read_too(tmp_path):
    whole = prepare(SeqSetConfig(data=str(write_folder(tmp_path / "a"))))
    inner = prepare(SeqSetConfig(data=str(tmp_path / "a" / "patient_ehr")))
    assert inner.splits.keys() == whole.splits.keys()
    assert inner.variables.names == whole.variables.names
    for name, rows in CLEAN.items():
        write_stay(tmp_path / "b" / f"{name}.parquet", rows)
    loose = prepare(SeqSetConfig(data=str(tmp_path / "b"), validation_share=0.2, test_share=0.4, model=SMALL))
    assert sorted(name for stays in loose.splits.values() for name in stays.ids) == sorted(CLEAN)
    assert loose.variables.names[1:] == ("HR", "Lactate", "SBP")
    assert abs(loose.train.val[loose.train.var == 1].mean()) < 1e-5


def test_without_statistics_they_come_from_the_training_stays_alone(tmp_path):
    root = write_folder(tmp_path, {**CLEAN, "200006.0": [("HR", 1e6, 0.0)]})
    (root / "stats.csv").unlink()
    ready = prepare(SeqSetConfig(data=str(root)))
    rates = ready.train.val[ready.train.var == 1]
    assert abs(rates.mean()) < 1e-5
    assert rates.std() == pytest.approx(1.0, abs=1e-4)


def test_a_variable_that_no_training_stay_has_is_left_out_and_counted(tmp_path):
    root = write_folder(tmp_path, {**CLEAN, "200006.0": [("New", 5.0, 0.0), ("HR", 70.0, 0.0)]})
    (root / "cached.csv").unlink()
    ready = prepare(SeqSetConfig(data=str(root), model=SMALL))
    assert ready.test.num_events.tolist() == [1]
    assert any(line.startswith("an event of a variable no training stay has: 1") for line in ready.lines)


def test_given_tables_are_used_and_must_be_there(tmp_path):
    root = write_folder(tmp_path / "data")
    other = write_csv(tmp_path / "other.csv", ["who", "dead"], [[f"{200001 + i}", 1] for i in range(6)])
    columns = ColumnConfig(label_patient="who", label="dead")
    assert prepare(SeqSetConfig(data=str(root), labels=other, columns=columns)).train.labels.tolist() == [1] * 4
    with pytest.raises(DataError, match="has no column 'ts_id'"):
        prepare(SeqSetConfig(data=str(root), labels=other))
    with pytest.raises(DataError, match="there is no file"):
        prepare(SeqSetConfig(data=str(root), embeddings=tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["HR", 1, 2], ["HR", 3, 4]], r"must name every variable once\n  seen: 2 rows, twice: \['HR'\]"),
        ([["HR", 1, ""]], r"cached\.csv:2, column '1' is not a finite number"),
        ([], "must name every variable once"),
    ],
)
def test_vectors_that_cannot_be_used_are_refused(tmp_path, rows, message):
    root = write_folder(tmp_path)
    write_csv(root / "cached.csv", ["Key", "0", "1"], rows)
    with pytest.raises(DataError, match=message):
        prepare(SeqSetConfig(data=str(root)))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text("abc0123", min_size=1, max_size=6), min_size=1, max_size=40, unique=True),
    st.integers(0, 3),
    st.randoms(),
)
def test_splits_hold_every_stay_once_and_do_not_depend_on_the_order(names, seed, random):
    labels = np.array([len(name) % 2 for name in names])
    shares = share_out(names, labels, validation=0.2, test=0.3, seed=seed)
    assert sorted(i for part in shares.values() for i in part) == list(range(len(names)))
    order = list(range(len(names)))
    random.shuffle(order)
    again = share_out([names[i] for i in order], labels[order], validation=0.2, test=0.3, seed=seed)
    for split in shares:
        assert {names[i] for i in shares[split]} == {names[order[i]] for i in again[split]}
    for label in (0, 1):
        members = sum(labels == label)
        assert sum(labels[shares["test"]] == label) == round(0.3 * members)


def test_generated_stays_are_split_alike_every_time_and_cut_as_asked():
    config = SeqSetConfig(generator=GeneratorConfig(stays=40), model=SMALL, first_hours=12.0, max_sets=5)
    ready = prepare(config)
    assert {split: len(stays) for split, stays in ready.splits.items()} == {"train": 28, "validation": 4, "test": 8}
    assert all(stays.num_sets.max() <= 5 and stays.set_minute.max() < 720 for stays in ready.splits.values())
    assert any(line.startswith("train: max_sets=5: ") for line in ready.lines)


def test_settings_that_leave_nothing_to_train_on_or_no_hours_are_refused():
    with pytest.raises(ConfigError, match="no stays would be left to train on"):
        SeqSetConfig(validation_share=0.5, test_share=0.5)
    with pytest.raises(ConfigError, match="cut_hours must be more than 0"):
        SeqSetConfig(cut_hours=(0.0,))


def test_real_persons_need_their_package_and_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "survival.datasets", None)
    with pytest.raises(DataError, match=r"comes with the package survival.*\n.*\n  do:   pip install 'survival>=2.0'"):
        prepare(SeqSetConfig(data="nafld", split_seed=91, model=SMALL))


def test_real_persons_are_known_up_to_the_index_day_and_nothing_later_is_read():
    pytest.importorskip("survival.datasets")
    ready = prepare(SeqSetConfig(data="nafld", model=SMALL))
    stays = list(ready.splits.values())
    assert sum(len(one) for one in stays) == 10_679
    assert sum(int(one.labels.sum()) for one in stays) == 731
    assert "chol" not in ready.variables.names
    assert "dbp" not in ready.variables.names
    age = ready.variables.numbers()["age"]
    for i in range(0, len(ready.train), 500):
        assert age in ready.train[i]["var"][ready.train[i]["set_id"] == ready.train[i]["set_id"][-1]]


def test_a_folder_that_changes_is_read_again(tmp_path):
    root = write_folder(tmp_path)
    assert len(prepare(SeqSetConfig(data=str(root))).train) == 4
    shutil.copy(root / "patient_ehr/train/200001.0.parquet", root / "patient_ehr/train/300001.0.parquet")
    assert len(prepare(SeqSetConfig(data=str(root))).train) == 5
