"""The note's two scripts, written by `truebatch init` and run with the note's options."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys

import pytest

from truebatch.cli.app import run

TINY = [
    "--set", "generator.stays=16", "--set", "generator.median_hours=6", "--set", "model.embedding_dim=8",
    "--set", "model.latent_dim=8", "--set", "model.reduced_dim=8", "--set", "model.feedforward_dim=8",
    "--set", "generator.positives=0.4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "seqset_vae"]) == 0
    return tmp_path


def start(monkeypatch, script, *options) -> int:
    monkeypatch.setattr(sys, "argv", [script, *options, *TINY])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    return int(ended.value.code or 0)


def losses(folder) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_the_training_script_takes_the_notes_options_and_padding_never_changes_the_result(written, monkeypatch):
    options = ["--batch_size", "4", "--max_sequence_length", "120", "--max_epochs", "1"]
    script = "train_with_collapse_detection.py"
    assert start(monkeypatch, script, *options, "--use_dynamic_padding", "--output_dir", "a") == 0
    fixed = ["--no-use_dynamic_padding", "--verbose", "--fast_detection", "--output_dir", "b"]
    assert start(monkeypatch, script, *options, *fixed) == 0
    assert len(losses(written / "a")) == 3
    assert losses(written / "b") == pytest.approx(losses(written / "a"), rel=1e-5)
    config = (written / "b" / "config.yaml").read_text()
    for line in ("max_events: 120", "batch_size: 4", "samples_per_step: 4", "epochs: 1", "check_frequency: 20"):
        assert line in config


def test_the_commands_of_the_note_run_one_after_the_other(written, monkeypatch, capsys):
    script = "train_with_collapse_detection.py"
    commands = [["--batch_size", "1"], ["--batch_size", "4"], ["--batch_size", "8", "--max_sequence_length", "1000"]]
    commands += [["--batch_size", "4", "--max_epochs", "1"], ["--batch_size", "4", "--use_dynamic_padding", "false"]]
    for command in commands:
        assert start(monkeypatch, script, *command) == 0
    assert "peak memory: " in capsys.readouterr().out
    folders = {folder.name.rpartition("-")[0] for folder in (written / "runs").iterdir()}
    assert folders == {
        "seqset_vae-batch1-epochs2", "seqset_vae-batch4-epochs2", "seqset_vae-batch8-epochs2-events1000",
        "seqset_vae-batch4-epochs1", "seqset_vae-batch4-epochs2-fixed",
    }  # fmt: skip
    capsys.readouterr()
    assert start(monkeypatch, script, *commands[1]) == 0
    assert "all steps were done before" in capsys.readouterr().out
    four, fixed = (next((written / "runs").glob(f"seqset_vae-batch4-epochs2{end}-*[0-9a-f]")) for end in ("", "-fixed"))
    assert losses(fixed) == pytest.approx(losses(four), rel=1e-5)


def test_more_processes_than_cores_are_refused(monkeypatch, capsys):
    assert start(monkeypatch, "train_with_collapse_detection.py", "--devices", "999") == 2
    assert "--devices 999" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train_with_collapse_detection.py", "test_batch_training.py"])
def test_help_describes_every_option_in_both_languages(written, script):
    done = subprocess.run([sys.executable, written / script, "--help"], capture_output=True, text=True, check=True)
    options = re.findall(r"^  (--[\w-]+)", done.stdout, re.MULTILINE)
    assert len(options) >= 6
    for words in (
        "批量大小" if "test" in script else "每次前向的病人数",
        "stays of a forward pass" if "train_" in script else "batch sizes",
    ):
        assert words in done.stdout


def test_a_wrong_folder_is_named_by_the_script(monkeypatch, capsys):
    assert start(monkeypatch, "train_with_collapse_detection.py", "--data_dir", "/no/such/folder") == 2
    assert "there is no data '/no/such/folder'" in capsys.readouterr().err


def test_the_test_script_prints_what_the_note_shows(monkeypatch, capsys):
    assert start(monkeypatch, "test_batch_training.py", "--batch_size", "1", "2", "--max_sequence_length", "100") == 0
    told = capsys.readouterr().out
    said = ("the same 2 stays at every size", "peak memory: ", "padding_mask sum: ")
    for words in ("Testing batch training functionality", "var shape: torch.Size([2, ", *said):
        assert words in told
    assert told.count("test completed successfully") == 2
