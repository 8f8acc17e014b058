"""A run folder is enough to use what it has trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import tasks
from truebatch.cli import run
from truebatch.errors import ConfigError, RunError
from truebatch.systems.finding import find_system
from truebatch.training.trained import open_trained

TARGET = f"{Path(tasks.__file__)}:system"


def trained_run(folder: Path) -> Path:
    arguments = ["train", TARGET, "--out", str(folder), "--log-format", "plain"]
    settings = ["train.max_steps=3", "train.samples_per_step=4", "train.save_every=1"]
    assert run([*arguments, *(part for one in settings for part in ("--set", one))]) == 0
    return folder


def test_a_run_gives_back_the_weights_it_ended_with(tmp_path):
    folder = trained_run(tmp_path / "run")
    trained = open_trained(folder)
    saved = torch.load(folder / "model" / "weights.pt")
    assert trained.step == 3
    assert trained.system.name == "numbers"
    assert not trained.model.training
    assert all(torch.equal(value, saved[name]) for name, value in trained.model.state_dict().items())


def test_a_setting_for_one_use_that_makes_another_model_is_refused(tmp_path):
    folder = trained_run(tmp_path / "run")
    with pytest.raises(RunError, match="do not belong to the model"):
        open_trained(folder, ["width=7"])


def test_a_damaged_best_checkpoint_is_passed_over(tmp_path):
    folder = trained_run(tmp_path / "run")
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    file = next(newest.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    assert open_trained(folder).step == 2


def test_what_is_no_run_is_refused_in_three_parts(tmp_path, capsys):
    assert run(["evaluate", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is not a run" in said
    assert "do:" in said


def test_a_run_whose_system_has_no_evaluation_says_so(tmp_path, capsys):
    folder = trained_run(tmp_path / "run")
    capsys.readouterr()
    assert run(["evaluate", str(folder)]) == 2
    assert "has no evaluation" in capsys.readouterr().err


def test_an_unknown_system_is_named_with_what_there_is():
    with pytest.raises(ConfigError, match="there is no system 'hff'"):
        find_system("hff")
