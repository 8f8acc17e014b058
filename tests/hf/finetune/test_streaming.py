"""`train hf` on data that is read as a stream, and with names of the Hub in the place of folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.hf.finetune.folders import model_folder, write_lines
from tests.hf.finetune.test_system import folder, loaded, losses, train  # noqa: F401
from truebatch.cli.app import run
from truebatch.hf import hub
from truebatch.training.logging.metrics_jsonl import read_metrics

STREAM = ["--set", "streaming=true", "--set", "train.window=8", "--set", "train.learning_rate=1e-2"]


@pytest.mark.parametrize("task", ["causal_lm", pytest.param("seq2seq", marks=pytest.mark.slow)])
def test_a_stream_in_one_window_trains_what_the_file_trains(folder, capsys, task):  # noqa: F811
    rate = ["--set", "train.learning_rate=1e-2"]
    assert train(task, *rate, "--out", "runs/file") == 0
    more = ["--set", "train.window=12", "--set", "train.max_steps=3"]
    assert train(task, *STREAM[:2], *rate, *more, "--out", "runs/stream") == 0
    assert losses("runs/stream") == losses("runs/file")
    assert "read as a stream" in capsys.readouterr().out
    for name, value in loaded(task, "runs/file/model").state_dict().items():
        assert torch.equal(value, loaded(task, "runs/stream/model").state_dict()[name])


def test_a_run_on_a_stream_resumes_with_the_samples_that_follow(folder):  # noqa: F811
    assert train("causal_lm", *STREAM, "--set", "train.max_steps=7", "--out", "runs/whole") == 0
    assert train("causal_lm", *STREAM, "--set", "train.max_steps=3", "--out", "runs/parts") == 0
    assert train("causal_lm", *STREAM, "--set", "train.max_steps=7", "--out", "runs/parts") == 0
    assert losses("runs/parts") == losses("runs/whole")


@pytest.mark.parametrize(
    ("task", "more", "words"),
    [
        ("causal_lm", [], "set max_steps"),
        ("causal_lm", ["--dry-run", "--set", "train.max_steps=3"], "planned as it is read"),
        ("sequence_classification", ["--set", "train.max_steps=3"], "leave streaming out"),
        ("causal_lm", ["--set", "max_length=5", "--set", "train.max_steps=3"], "overlong=drop"),
    ],
)
def test_what_a_stream_cannot_do_is_said(folder, capsys, task, more, words):  # noqa: F811
    assert train(task, *STREAM, *more) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_long_samples_of_a_stream_are_dropped_or_cut_as_asked(folder):  # noqa: F811
    lines = [{"text": "green " * (1 + i % 7)} for i in range(12)]
    write_lines(folder / "causal_lm.jsonl", lines)
    for overlong in ("drop", "cut"):
        more = ["--set", f"overlong={overlong}", "--set", "max_length=5", "--set", "train.max_steps=2"]
        assert train("causal_lm", *STREAM, *more, "--out", f"runs/{overlong}") == 0
    tokens = [sum(r["tokens"] for r in read_metrics(Path(f"runs/{name}/metrics.jsonl"))) for name in ("drop", "cut")]
    assert 0 < tokens[0] < tokens[1]


@pytest.fixture
def cached(folder, monkeypatch):  # noqa: F811
    """A model in the Hub's cache, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    kept = folder / "hub" / "models--someone--tiny-llama"
    snapshot = kept / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    model_folder(snapshot)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    return snapshot


def train_name(name: str, *more: str) -> int:
    given = ["--model", name, "--data", "causal_lm.jsonl", "--task", "causal_lm", "--set", "train.samples_per_step=4"]
    return run(["train", "hf", *given, *more])


def test_a_name_of_the_hub_is_its_snapshot_in_the_cache_and_an_adapter_names_it(cached):
    pytest.importorskip("peft")
    assert train_name("someone/tiny-llama", "--lora") == 0
    about = json.loads(Path("runs/hf/model/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == "someone/tiny-llama"
    assert about["revision"] == "0" * 40
    assert train_name("someone/tiny-llama", "--lora") == 0, "the same run again"


def test_a_name_that_cannot_be_fetched_says_what_was_tried(cached, capsys):
    assert train_name("someone/else") == 2
    error = capsys.readouterr().err
    assert "cannot be" not in error
    assert "someone/else is neither a file or folder here nor a model that can be fetched" in error
    assert "HF_HUB_OFFLINE" in error
    assert "hf download someone/else --local-dir DIR" in error


def test_a_dataset_of_the_hub_is_read_as_a_stream(folder, capsys, monkeypatch):  # noqa: F811
    datasets = pytest.importorskip("datasets")
    lines = [json.loads(line) for line in Path("causal_lm.jsonl").read_text().splitlines()]
    asked = []

    def load(name, **settings):
        asked.append((name, settings))
        return iter(lines)

    monkeypatch.setattr(datasets, "load_dataset", load)
    more = ["--model", "llama", "--task", "causal_lm", "--data", "someone/chats", "--set", "train.max_steps=3"]
    model_folder(Path("llama"))
    assert run(["train", "hf", *more]) == 2
    assert "add --set streaming=true" in capsys.readouterr().err
    assert run(["train", "hf", *more, *STREAM, "--set", "train.samples_per_step=4"]) == 0
    assert asked[0] == ("someone/chats", {"split": "train", "streaming": True})


@pytest.mark.parametrize(
    ("name", "is_name"),
    [("Qwen/Qwen2.5-0.5B", True), ("nowhere", False), ("a/b/c", False), ("/a/b", False), ("../a", False)],
)
def test_what_looks_like_a_name_of_the_hub(tmp_path, monkeypatch, name, is_name):
    monkeypatch.chdir(tmp_path)
    assert hub.is_hub_name(Path(name)) is is_name
    if is_name:
        Path(name).mkdir(parents=True)
        assert not hub.is_hub_name(Path(name)), "a folder of that name comes first"
