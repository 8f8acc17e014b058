"""`truebatch train hf --task vlm` as it is typed: frozen or trained, with adapters, resumed, evaluated, asked."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.hf.finetune.vision.folders import data
from truebatch.cli.app import run
from truebatch.testing.tiny_hf.processors import tiny_vlm_folder
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.logging.metrics_jsonl import read_metrics

EXAMPLE = Path(__file__).parents[4] / "examples" / "vision_language" / "train.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    tiny_vlm_folder(tmp_path / "qwen", "qwen2_vl")
    data(tmp_path / "data")
    return tmp_path


def train(*more: str) -> int:
    given = ["train", "hf", "--model", "qwen", "--data", "data/llava.jsonl", "--task", "vlm"]
    step = ["--set", "train.samples_per_step=5", "--set", "train.learning_rate=1e-2", "--set", "train.workers=0"]
    return run([*given, *step, *more])


def losses(where: str) -> list[float]:
    return [r["loss"] for r in read_metrics(Path(where) / "metrics.jsonl") if "loss" in r]


def changed(where: str) -> set[str]:
    """Parts of the model with a parameter that is no longer that of the folder."""
    before, after = (AutoModelForImageTextToText.from_pretrained(one).state_dict() for one in ("qwen", where))
    assert before.keys() == after.keys()
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


def test_a_run_learns_is_evaluated_and_answers_about_images(folder, capsys):
    more = ["--set", "validation=data/llava.jsonl", "--set", "train.patches=150", "--set", "train.epochs=8"]
    assert train(*more) == 0
    out = capsys.readouterr().out
    assert "layout: packed, proven equal" in out
    assert "at most 150 patches" in out
    assert losses("runs/hf")[-1] < losses("runs/hf")[0] / 2
    names = changed("runs/hf/model")
    assert any("merger" in name for name in names)
    assert not any(".visual.blocks." in name for name in names)  # the tower is frozen by default
    assert run(["evaluate", "runs/hf"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert run(["generate", "runs/hf", "--prompt", "<image:data/0.png>what is it", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip()
    assert run(["generate", "runs/hf", "--prompt", "<image:none.png>what", "--temperature", "0"]) == 2
    assert "there is no image none.png" in capsys.readouterr().err


def test_adapters_stay_in_the_language_model_unless_the_tower_is_trained(folder, capsys):
    for tower, expected in (("frozen", False), ("trained", True)):
        assert train("--lora", "--set", f"tower={tower}", "--set", "train.limit=5", "--out", tower) == 0
        names = load_newest(Path(tower) / "checkpoints").checkpoint.parts["model"]
        assert any("lora_A" in name and "language_model" in name for name in names)
        assert any("lora_A" in name and "visual" in name for name in names) == expected
    assert "transformers.AutoModelForImageTextToText.from_pretrained('trained/model')" in capsys.readouterr().out
    assert type(AutoModelForImageTextToText.from_pretrained("trained/model")).__name__.startswith("Qwen2VL")


def test_the_example_measures_its_pictures_and_packs(folder, capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "tokens: [78, 94" in out
    assert "layout: packed" in out


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bits(folder):
    assert train("--set", "train.epochs=2", "--out", "whole") == 0
    assert train("--set", "train.epochs=2", "--set", "train.max_steps=2", "--out", "parts") == 0
    assert train("--set", "train.epochs=2", "--set", "train.max_steps=4", "--out", "parts") == 0
    assert losses("parts") == losses("whole")


def test_a_dry_run_says_what_the_steps_are(folder, capsys):
    assert train("--dry-run", "--set", "train.patches=150") == 0
    assert "fill" in capsys.readouterr().out


@pytest.mark.slow
def test_images_have_the_same_bits_on_any_number_of_processes(folder):
    bits = ["--set", "train.exactness=bits", "--set", "train.digest_every=1", "--set", "train.epochs=2"]
    assert train(*bits, "--out", "runs/one") == 0
    assert train(*bits, "--out", "runs/three", "--devices", "3", "--set", "train.cells=1024") == 0
    assert run(["diff", "runs/one", "runs/three"]) == 0
    assert train(*bits, "--set", "train.patches=150", "--out", "runs/limit") == 2
