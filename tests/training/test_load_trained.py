"""A run folder is enough to use what it has trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import tasks
from truebatch.cli.app import run
from truebatch.cli.run_folder import own_folder
from truebatch.errors import ConfigError, RunError
from truebatch.training import load_trained
from truebatch.training.load_trained import open_trained
from truebatch.training.registry import find_system

TARGET = f"{Path(tasks.__file__)}:system"


def trained_run(folder: Path) -> Path:
    arguments = ["train", TARGET, "--out", str(folder), "--log-format", "plain"]
    settings = ["train.max_steps=3", "train.samples_per_step=4", "train.save_every=1"]
    assert run([*arguments, *(part for one in settings for part in ("--set", one))]) == 0
    return folder


def test_a_run_gives_back_the_weights_it_ended_with(tmp_path):
    folder = trained_run(tmp_path / "run")
    trained = open_trained(folder, named=TARGET)
    saved = torch.load(folder / "model" / "weights.pt")
    assert trained.step == 3
    assert trained.system.name == "numbers"
    assert not trained.model.training
    assert all(torch.equal(value, saved[name]) for name, value in trained.model.state_dict().items())


def test_a_trained_run_reads_its_data_once_and_not_at_all_where_the_model_needs_none(tmp_path, monkeypatch):
    folder, read = trained_run(tmp_path / "run"), []

    def prepare(config):
        read.append(config)
        return tasks.prepare(config)

    system = replace(tasks.system, prepare=prepare)
    monkeypatch.setattr(load_trained, "find_system", lambda target: system)
    trained = open_trained(folder, named=TARGET)
    assert trained.task is trained.task
    assert len(read) == 1
    system = replace(system, restore_model=lambda config, weights: tasks.build(config))
    restored = open_trained(folder, named=TARGET)
    assert len(read) == 1
    assert len(restored.task.data.samples) == 24
    assert len(read) == 2


def test_a_setting_for_one_use_that_makes_another_model_is_refused(tmp_path):
    folder = trained_run(tmp_path / "run")
    with pytest.raises(RunError, match="do not belong to the model"):
        open_trained(folder, ["width=7"], named=TARGET)


def test_a_damaged_best_checkpoint_is_passed_over(tmp_path):
    folder = trained_run(tmp_path / "run")
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    file = next(newest.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    assert open_trained(folder, named=TARGET).step == 2


def test_what_is_no_run_is_refused_in_three_parts(tmp_path, capsys):
    assert run(["evaluate", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is not a run" in said
    assert "do:" in said


def test_a_run_whose_system_has_no_evaluation_says_so(tmp_path, capsys):
    folder = trained_run(tmp_path / "run")
    capsys.readouterr()
    assert run(["evaluate", str(folder), "--system", TARGET]) == 2
    assert "has no evaluation" in capsys.readouterr().err


def test_an_unknown_system_is_named_with_what_there_is():
    with pytest.raises(ConfigError, match="there is no system 'hff'"):
        find_system("hff")


@pytest.mark.parametrize("command", ["evaluate", "generate", "show", "verify"])
@pytest.mark.parametrize(
    "target", ["{run}/evil.py:system", "run.evil:system", "evil:system", "os:abort", "posix:abort"]
)
def test_no_command_runs_code_that_a_run_folder_names(command, target, tmp_path, monkeypatch, capsys):
    folder = trained_run(tmp_path / "run")
    for place in (folder, tmp_path):
        (place / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'CODE_WAS_RUN')!r})\nsystem = 1\n")
    (folder / "run.json").write_text(json.dumps({"system": target.format(run=folder)}))
    monkeypatch.chdir(tmp_path)
    more = ["--prompt", "x"] if command == "generate" else []
    assert run([command, "run", *more]) == 2
    said = capsys.readouterr().err
    assert not (tmp_path / "CODE_WAS_RUN").exists()
    assert "does not come with truebatch" in said
    assert "--system file.py:NAME" in said


def test_a_system_of_ones_own_is_named_on_the_command_line_and_a_difference_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = trained_run(tmp_path / "run")
    capsys.readouterr()
    assert run(["verify", "run", "--system", TARGET, "--layout", "padded"]) == 0
    assert "the run says its system" not in capsys.readouterr().err
    (folder / "run.json").write_text('{"system": "mine:system"}')
    assert run(["verify", "run", "--system", TARGET, "--layout", "padded"]) == 0
    assert "the run says its system is 'mine:system'" in capsys.readouterr().err


def test_a_system_beside_what_is_no_run_is_refused(capsys):
    assert run(["verify", "chinese_gpt", "--system", TARGET]) == 2
    assert "which is not a run folder" in capsys.readouterr().err


def test_links_in_a_run_lead_no_write_outside(tmp_path, capsys):
    victim, run_folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    (run_folder / "evaluation").mkdir(parents=True)
    (run_folder / "evaluation" / "predictions.csv").symlink_to(victim)
    with pytest.raises(RunError, match="is not written to"):
        own_folder(run_folder, "evaluation")
    (run_folder / "findings").symlink_to(tmp_path)
    with pytest.raises(RunError, match="is not written to"):
        own_folder(run_folder, "findings")
    assert victim.read_text() == "mine"


def test_what_a_run_reads_outside_of_its_folder_is_said_first(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"system": "chinese_gpt"}')
    (tmp_path / "run" / "config.yaml").write_text("data: /etc/passwd\n")
    assert run(["evaluate", str(tmp_path / "run")]) == 2
    assert "reads data=/etc/passwd" in capsys.readouterr().err
