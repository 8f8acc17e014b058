"""`truebatch seqset_vae`, tried as a user would, also wrongly."""

from __future__ import annotations

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.systems.seqset_vae.folders import CLEAN, write_csv, write_folder
from truebatch.cli.app import run
from truebatch_systems.seqset_vae.config import ColumnConfig, GeneratorConfig, ModelConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.export import guess_type
from truebatch_systems.seqset_vae.data.prepare import prepare

SMALL = [
    "--set", "generator.stays=12", "--set", "generator.median_hours=8", "--set", "model.embedding_dim=12",
    "--set", "model.latent_dim=8", "--set", "model.reduced_dim=8", "--set", "model.feedforward_dim=8",
]  # fmt: skip


def test_validate_reports_every_fault_with_its_place_and_says_whether_a_run_would_start(tmp_path, capsys):
    stays = dict(CLEAN)
    stays["200001.0"] = [("HR", float("nan"), 30.0), ("SBP", 100.0, 10.0), ("wrong", 1.0, 40.0)]
    stays["200002.0"] = []
    write_folder(tmp_path, stays, labels={"200003": 1, "200004": 3})
    (tmp_path / "patient_ehr" / "train" / "200003.0.parquet").write_bytes(b"no")
    assert run(["seqset_vae", "validate", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    faults = {fault["fault"]: fault for fault in found["faults"]}
    assert set(faults) == {"not_finite", "unknown_variable", "empty", "missing_label", "bad_label", "unreadable"}
    assert set(found["stops"]) == {"not_finite", "unknown_variable", "bad_label", "unreadable"}
    assert "200001.0.parquet row 0: variable 'HR', " in faults["not_finite"]["first"][0]
    assert "200001.0.parquet row 2: variable 'wrong'" in faults["unknown_variable"]["first"][0]
    assert "oc.csv:3: '3', classes are 0 to 1" in faults["bad_label"]["first"][0]
    assert faults["missing_label"]["number"] == 5
    assert run(["seqset_vae", "validate", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "a run would stop: " in told
    assert "an event of a variable nobody knows: 1 in 1 places; stops a run" in told


def test_validate_of_clean_data_says_so(tmp_path, capsys):
    assert run(["seqset_vae", "validate", str(write_folder(tmp_path))]) == 0
    told = capsys.readouterr().out
    assert "train: 4 stays, 12 sets, 16 events" in told
    assert told.endswith("no faults\n")


def test_what_cannot_be_validated_is_said_in_three_parts(tmp_path, capsys):
    assert run(["seqset_vae", "validate", "genrated"]) == 2
    assert "there is no data 'genrated'; did you mean 'generated'?" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(["seqset_vae", "validate", str(tmp_path / "empty")]) == 2
    assert "holds no training stays" in capsys.readouterr().err
    table = write_csv(tmp_path / "t.csv", ["who", "minute", "variable", "value"], [["a", 0, "HR", 1]])
    assert run(["seqset_vae", "validate", str(table)]) == 2
    assert "has no column 'patient'" in capsys.readouterr().err
    assert run(["seqset_vae", "validate", "generated", "--set", "generator.stay=3"]) == 2
    assert "did you mean 'stays'" in capsys.readouterr().err


def test_prepared_files_give_the_stays_that_carrying_in_memory_gives(tmp_path, capsys):
    source, target = write_folder(tmp_path / "raw"), tmp_path / "carried"
    arguments = ["seqset_vae", "prepare", "--input-dir", str(source), "--output-dir", str(target)]
    arguments += ["--lvcf-minutes", "40", "--always-carry-vars", "SBP"]
    assert run(arguments) == 0
    assert "wrote 6 stays with 36 events, 33% of them carried forward" in capsys.readouterr().out
    table = parquet.read_table(target / "patient_ehr" / "train" / "200001.0.parquet")
    assert table.column_names == ["variable", "value", "time", "set_index", "age", "is_carry", "v0", "v1", "v2"]
    assert table["variable"].to_pylist() == ["HR", "SBP", "HR", "SBP", "SBP", "Lactate"]
    assert table["age"].to_pylist() == [0, 0, 0, 30, 95, 0]
    assert table["is_carry"].to_pylist() == [0, 0, 0, 1, 1, 0]
    read = prepare(SeqSetConfig(data=str(target)))
    carried = prepare(SeqSetConfig(data=str(source), carry_minutes=40.0, always_carry=("SBP",)))
    for split, stays in carried.splits.items():
        for name in ("var", "val", "set_minute", "set_size", "labels"):
            np.testing.assert_allclose(getattr(read.splits[split], name), getattr(stays, name), rtol=1e-6)
    assert run(arguments) == 2
    assert "files are in the way, nothing was written" in capsys.readouterr().err
    assert run([*arguments, "--overwrite", "--smoke"]) == 0
    assert (target / "schema.csv").read_text().splitlines()[0] == "feature_id,type,cardinality,name"


def test_prepare_names_a_folder_or_a_table_that_is_not_there(tmp_path, capsys):
    arguments = ["seqset_vae", "prepare", "--output-dir", str(tmp_path / "out"), "--input-dir"]
    assert run([*arguments, str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    root = write_folder(tmp_path / "raw")
    (root / "stats.csv").unlink()
    assert run([*arguments, str(root)]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert run([*arguments, str(root), "--lvcf-minutes", "-1"]) == 2
    assert "0 minutes or more" in capsys.readouterr().err


def test_the_kind_of_a_variable_is_guessed_from_its_values():
    assert guess_type({0.0, 1.0}) == ("bin", 2)
    assert guess_type({2.0, 3.0, 4.0}) == ("cat", 3)
    assert guess_type({2.0, 4.0}) == ("cont", 0)
    assert guess_type({0.5}) == ("cont", 0)
    assert guess_type(set()) == ("cont", 0)


def test_test_batch_prints_shapes_padding_and_memory_for_every_size(capsys):
    assert run(["seqset_vae", "test-batch", "--batch-size", "1", "--batch-size", "3", *SMALL]) == 0
    told = capsys.readouterr().out
    for words in ("Testing batch size: 3", "Training batches: 3", "Validation batches: 1", "padding_mask sum: "):
        assert words in told
    assert told.count("Forward pass successful") == 2
    assert "MB; " in told
    assert run(["seqset_vae", "test-batch", "--batch-size", "3", "--json", *SMALL]) == 0
    trial = json.loads(capsys.readouterr().out)[0]
    B, N, D = trial["shapes"]["var"]
    assert (B, D) == (3, 12)
    assert trial["padded_share"] == pytest.approx(trial["num_padding"] / (B * N))
    assert trial["bytes_added"] > 0
    assert trial["difference"] <= 1e-5
    assert trial["stays"] == 3
    assert trial["peak_bytes"] > trial["bytes_added"]


def test_fixed_padding_is_as_wide_as_the_limit_or_the_longest_stay(capsys):
    fixed = ["--no-use-dynamic-padding", "--batch-size", "2", "--json", *SMALL]
    assert run(["seqset_vae", "test-batch", *fixed]) == 0
    generator = GeneratorConfig(stays=12, median_hours=8)
    longest = prepare(SeqSetConfig(generator=generator, model=ModelConfig(embedding_dim=12))).most_events
    assert json.loads(capsys.readouterr().out)[0]["shapes"]["padding_mask"] == [2, longest]
    assert run(["seqset_vae", "test-batch", "--max-sequence-length", "90", *fixed]) == 0
    assert json.loads(capsys.readouterr().out)[0]["shapes"]["padding_mask"] == [2, 90]
    assert run(["seqset_vae", "test-batch", "--batch-size", "0", *SMALL]) == 2
    assert "a batch holds at least one stay" in capsys.readouterr().err


def test_a_long_table_gives_the_same_stays_as_csv_and_as_parquet(tmp_path):
    rows = [
        [name, label, variable, value, minute / 60]
        for label, (name, events) in enumerate(CLEAN.items())
        for variable, value, minute in events
    ]
    header = ["stay", "died", "what", "number", "hour"]
    for row in rows:
        row[1] %= 2
    text = write_csv(tmp_path / "events.csv", header, rows)
    columns = list(zip(*rows, strict=True))
    parquet.write_table(pyarrow.table(dict(zip(header, map(list, columns), strict=True))), tmp_path / "events.parquet")
    names = ColumnConfig(patient="stay", label="died", variable="what", value="number", time="hour", unit_minutes=60.0)
    shares = {"validation_share": 0.0, "test_share": 0.3}
    found = [
        prepare(SeqSetConfig(data=str(path), columns=names, **shares)) for path in (text, tmp_path / "events.parquet")
    ]
    for split in ("train", "test"):
        one, other = (ready.splits[split] for ready in found)
        assert one.ids == other.ids
        for name in ("var", "val", "set_minute", "set_size", "labels"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    train, test = found[0].splits["train"], found[0].splits["test"]
    assert set(train.ids) | set(test.ids) == set(CLEAN)
    assert not set(train.ids) & set(test.ids)
    assert train[0]["set_minute"].tolist() == [0.0, 30.0, 95.0]


def test_an_empty_name_of_a_variable_is_a_fault_and_no_variable(tmp_path, capsys):
    table = tmp_path / "events.csv"
    rows = [f"p{k % 9},{k},{'HR' if k != 4 else ''},{k % 7}" for k in range(40)]
    table.write_text("patient,minute,variable,value\n" + "\n".join(rows) + "\n")
    assert run(["seqset_vae", "validate", str(table)]) == 1
    out = capsys.readouterr().out
    assert "an event without the name of a variable: 1" in out
    assert f"{table}:6" in out
    assert run(["seqset_vae", "validate", str(table), "--set", "drop_faulty=true"]) == 0


def test_a_dry_run_foresees_memory_without_running_the_model(capsys):
    sizes = ["embedding_dim=16", "reduced_dim=8", "latent_dim=8", "inducing_points=2", "feedforward_dim=8"]
    settings = ["generator.stays=20", "generator.median_hours=6", *(f"model.{size}" for size in sizes)]
    assert run(["train", "seqset_vae", "--dry-run", *(part for one in settings for part in ("--set", one))]) == 0
    said = capsys.readouterr()
    assert "memory, GiB" in said.out
    assert said.err == ""
