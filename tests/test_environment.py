"""A bug report tells about the machine and nothing about its owner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from truebatch import doctor
from truebatch.attention import score_rule
from truebatch.environment import describe_environment, redact


def test_the_description_is_plain_data_with_the_versions_that_matter():
    facts = json.loads(json.dumps(describe_environment()))
    assert facts["truebatch"]
    assert facts["python"].startswith("CPython 3.")
    assert facts["cpus"] >= 1
    assert facts["packages"]["torch"]


SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "CUDA_SECRET": "do not show",
    "TRUEBATCH_CACHE": "/home/alice/cache",
    "TORCH_HOME": "https://alice:wonderland@mirror.example/torch",
    "NCCL_DEBUG_FILE": "sk-abcdefghijklmnopqrstuvwx",
    "AWS_ACCESS_KEY_ID": "AKIAABCDEFGHIJKLMNOP",
}


def test_no_secret_and_no_name_of_a_person_is_shown(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    text = json.dumps(describe_environment())
    for word in ("hf_abc", "0123456789abcdef", "do not show", "alice", "wonderland", "sk-abc", "AKIA", "WANDB"):
        assert word not in text
    assert "TORCH_HOME" in text


@pytest.mark.parametrize("value", ["0,1", "expandable_segments:True", "INFO", "zh_CN.UTF-8"])
def test_ordinary_settings_are_shown_as_they_are(value):
    assert redact("CUDA_VISIBLE_DEVICES", value) == value
    assert str(Path.home()) not in redact("TORCH_HOME", f"{Path.home()}/x")


@pytest.mark.parametrize(
    ("card", "capability", "verdicts"),
    [("1 x NVIDIA H200 (13.0)", (9, 0), ["note"]), ("1 x NVIDIA A100 (13.0)", (8, 0), []), ("none (CPU)", None, [])],
)
def test_the_package_of_the_fastest_attention_is_asked_for_where_it_matters(card, capability, verdicts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = doctor._attention_plans(doctor.Check("accelerator", "ok", card))
    assert [check.verdict for check in found] == verdicts


@pytest.mark.parametrize(("is_confused", "verdict"), [(False, "ok"), (True, "note")])
def test_attention_with_wrong_gradients_is_named(is_confused, verdict, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(score_rule, "plans_confuse_layouts", lambda _device: is_confused)
    (check,) = doctor._attention_gradients(doctor.Check("accelerator", "ok", "1 x NVIDIA H200 (13.0)"))
    assert check.verdict == verdict
    assert ("enable_cudnn_sdp(False)" in check.words) == is_confused
    assert doctor._attention_gradients(doctor.Check("accelerator", "ok", "none (CPU)")) == []


def test_a_folder_that_was_never_installed_is_no_fault(monkeypatch):
    def requires(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", requires)
    (check,) = doctor._packages()
    assert (check.name, check.verdict) == ("truebatch", "note")
