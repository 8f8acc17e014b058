"""The note's configuration and scripts, written by `truebatch init vlm_pruning` and run as a user runs them."""

from __future__ import annotations

import ast
import json
import runpy
import sys

import pytest

from truebatch.cli.app import run

TINY = ["--set", "dataset_settings.train=48", "--set", "dataset_settings.validation=0", "--set", "train.epochs=1"]


@pytest.fixture(autouse=True)
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "vlm_pruning"]) == 0
    monkeypatch.syspath_prepend(str(tmp_path))  # as Python does for a script
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("method", "engine")]:
        del sys.modules[name]


def start(monkeypatch, script, *options):
    monkeypatch.setattr(sys, "argv", [script, *options])
    runpy.run_path(script, run_name="__main__")


def test_the_training_script_trains_and_its_run_is_evaluated_and_shown(written, monkeypatch, capsys):
    start(monkeypatch, "train.py", "--backbone", "tiny-llava", *TINY)
    capsys.readouterr()
    few = ["--set", "evaluation_settings.eval_max_samples=4", "--set", "evaluation_settings.max_new_tokens=2"]
    assert run(["evaluate", "runs/vlm_pruning", *few, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) >= {"origin", "hard", "points_lost"}
    assert (written / "runs/vlm_pruning/evaluation/predictions-hard.jsonl").read_text().count("\n") == 4
    more = ["--set", "evaluation_settings.pictures=1", "--set", "evaluation_settings.curve_budgets=[0.3]"]
    assert run(["show", "runs/vlm_pruning", *few, *more]) == 0
    assert "50-kept-tokens-00.svg" in capsys.readouterr().out
    assert run(["report", "runs/vlm_pruning"]) == 0
    assert "accuracy by budget" in (written / "runs/vlm_pruning/report.html").read_text(encoding="utf-8").lower()


def test_the_step_of_the_note_gives_the_same_losses_batched_and_one_by_one(monkeypatch, capsys):
    start(monkeypatch, "training_step.py")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step: train_step_batch"
    batched, singly = (ast.literal_eval(line.partition(" ")[2]) for line in (said[1], said[3]))
    assert batched == pytest.approx(singly, rel=1e-4, abs=2e-4)  # printed with four digits
    assert "'vision_tokens_mean': 16.0" in said[2]
    assert said[2] == said[4]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("dataset_settings.name=shape", "did you mean 'shapes'"),
        ("dataset_settings.nmae=shapes", "did you mean 'name'"),
        ("dataset_settings.name=missing.jsonl", "there is no file"),
        ("dataset_settings.train=50", "blocks of 48"),
        ("backbone_settings.name=tiny-lava", "did you mean 'tiny-llava'"),
    ],
)
def test_wrong_settings_and_missing_files_end_with_code_2_and_are_never_called_finished(option, said, capsys):
    command = ["train", "vlm_pruning", "--config", "configs/vision_token_pruning.yaml", "--set", option]
    assert run(command) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "finished" not in shown.out + shown.err


def test_an_image_that_cannot_be_opened_ends_with_an_error_that_names_the_sample(written, capsys):
    (written / "broken.png").write_text("not an image")
    line = {"id": "q7", "image": "broken.png", "question": "What?", "answer": "red", "split": "train"}
    (written / "data.jsonl").write_text(json.dumps(line) + "\n")
    options = ["dataset_settings.name=data.jsonl", "dataset_settings.validation=0", "dataset_settings.train=1"]
    command = ["train", "vlm_pruning", "--config", "configs/vision_token_pruning.yaml"]
    assert run([*command, *(part for option in options for part in ("--set", option))]) == 2
    shown = capsys.readouterr()
    assert "q7" in shown.err
    assert "broken.png" in shown.err
    assert "finished" not in shown.out + shown.err


def test_a_run_without_pictures_of_its_own_says_so(tmp_path, capsys):
    assert run(["show", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_the_imports_of_the_original_scripts_work_as_written():
    code = "from method.training import train_step\nfrom method.training_batch import train_step_batch\n"
    code += (
        "from method.utils_batch import replace_vision_tokens_in_embeddings_batch, register_multi_layer_hooks_batch\n"
    )
    code += "from engine.backbones.impl.mllm.llava import Backbone\n"
    code += "assert {'_resize_image', 'preprocess_batch'} <= set(dir(Backbone))\n"
    exec(code, {})


@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen2.5-vl-7b", "qwen3-vl-8b"])
def test_settings_for_real_backbones_are_sound_and_ask_for_the_weights(name, capsys):
    """With the folder of a tiny model of the same family in its place, the same settings are planned and estimated."""
    config = f"configs/{name}.yaml"
    assert run(["train", "vlm_pruning", "--config", config, "--dry-run"]) == 2
    assert f"models/{name}" in capsys.readouterr().err


def test_a_budget_that_is_ignored_is_refused_and_one_that_asks_for_nothing_is_said(capsys):
    tiny = ["train", "vlm_pruning", "--dry-run", *TINY]
    assert run([*tiny, "--set", "method_settings.target_sparsity=0.7"]) == 2
    assert "target_sparsity is not used" in capsys.readouterr().err
    off = ["--set", "method_settings.use_token_num_target=false"]
    assert run([*tiny, *off, "--set", "method_settings.target_token_num=9"]) == 2
    assert "target_token_num is not used" in capsys.readouterr().err
    assert run(tiny) == 0
    out = capsys.readouterr()
    assert "nothing has to be dropped: an image has 16 vision tokens, the budget is 200" in out.out + out.err
