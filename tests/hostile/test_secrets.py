"""Secrets of the environment: none of them reaches what the product prints or writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from truebatch.cli.app import run

SYSTEM = f"{Path(__file__).parent.parent / 'tasks.py'}:system"
NAMES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY", "OPENAI_API_KEY", "COMET_API_KEY"),
    *(
        "NEPTUNE_API_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AZURE_CLIENT_SECRET",
    ),
    *(
        "GITHUB_TOKEN",
        "DASHSCOPE_API_KEY",
        "MODELSCOPE_API_TOKEN",
        "TRUEBATCH_API_KEY",
        "TORCH_AUTH_TOKEN",
        "RAY_AUTH_TOKEN",
    ),
    *("CUDA_LICENSE_KEY", "SLURM_JWT_TOKEN", "PIP_PASSWORD"),
)


@pytest.fixture
def secrets(tmp_path, monkeypatch):
    """Twenty variables with values that occur nowhere else, and a folder to work in."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    planted = {name: f"planted-{number:02d}-zxqv" for number, name in enumerate(NAMES)}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    return planted


def test_twenty_planted_secrets_are_in_no_output_and_no_file(secrets, tmp_path, capfd):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"id": i, "prompt": f"q {i}"}) + "\n" for i in range(4)))
    settings = ["--set", "train.epochs=1", "--set", "train.samples_per_step=4"]
    assert run(["train", SYSTEM, *settings, "--out", "run"]) == 0
    assert run(["score", "d.jsonl", "--model", "scripted", "--yesno", "--out", "scored"]) == 0
    assert run(["run", "export", "scored", "--to", "scores.jsonl"]) == 0
    assert run(["report", "run", "scored", "--out", "report.html"]) == 0
    assert run(["env"]) == 0
    assert run(["env", "--json"]) == 0
    assert run(["train", "nosuch", "--debug"]) == 2
    told = "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert "planted" not in told
    assert [path for path in files if b"zxqv" in path.read_bytes()] == []


def test_a_planted_secret_would_be_found(secrets, tmp_path):
    (tmp_path / "leak.txt").write_text(secrets["HF_TOKEN"])
    assert [path.name for path in tmp_path.rglob("*") if b"zxqv" in path.read_bytes()] == ["leak.txt"]
