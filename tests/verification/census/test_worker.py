"""One architecture examined: what the row says, and that the independent check sees what `verify` cannot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.verification.census.works import with_fault
from truebatch.hf.heads.heads import head_of
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.census import worker
from truebatch.verification.census.worker import LAYOUTS, CensusTask, examine


def row_of(model_type, head="causal_lm", **more):
    row = examine(CensusTask(model_type=model_type, head=head), **more)
    assert json.loads(json.dumps(row)) == row
    return row


@pytest.mark.parametrize(
    ("model_type", "head", "verdict", "chosen"),
    [
        ("llama", "causal_lm", "equal", "packed"),
        ("gpt_oss", "causal_lm", "equal", "packed"),
        pytest.param("rwkv", "causal_lm", "equal", "packed", marks=pytest.mark.slow),
        ("bert", "masked_lm", "equal", "packed"),
        ("t5", "seq2seq", "equal", "packed"),
        ("encoder-decoder", "seq2seq", "equal", "packed"),
        ("qwen2_vl", "vision_language", "equal", "packed"),
        pytest.param("gemma3", "vision_language", "equal", "packed", marks=pytest.mark.slow),
    ],
)
def test_an_architecture_is_equal_or_falls_back_and_a_leak_would_have_been_seen(model_type, head, verdict, chosen):
    row = row_of(model_type, head)
    assert (row["verdict"], row["chosen"]) == (verdict, chosen), row
    assert set(row["layouts"]) == set(LAYOUTS)
    assert row["layouts"][chosen]["check"]["verdict"] == "equal"
    assert min(row["leak"]["planted"], row["leak"]["seen_by_verify"]) >= 100


def test_a_quick_row_has_the_layouts_that_were_tried_and_what_packing_costs():
    row = examine(CensusTask(model_type="qwen3_next", head="causal_lm", is_quick=True))
    assert (row["verdict"], set(row["layouts"]), row["plain"]) == ("equal", {"packed"}, {}), row
    assert row["how"] == "segment table; Qwen3NextGatedDeltaNet by groups of similar length"
    assert row["speed"]["times"] > 0


def test_plain_transformers_packs_gpt_oss_wrongly_and_llama_rightly():
    # gpt_oss never hands its positions to the mask, so nothing keeps packed samples apart.
    plain = {name: row_of(name)["plain"]["packed"]["verdict"] for name in ("gpt_oss", "llama")}
    assert plain == {"gpt_oss": "different", "llama": "equal"}


def test_a_fault_that_verify_cannot_meet_is_wrong_and_not_noticed():
    row = row_of("llama", build=with_fault)
    assert row["verdict"] == "wrong and not noticed"
    assert row["layouts"][row["chosen"]]["check"]["verdict"] == "different"


def test_an_architecture_that_cannot_be_built_says_why():
    def build(model_type, head):
        from truebatch.errors import ConfigError

        raise ConfigError("cannot be built", seen="ImportError: a package is missing", do="install it")

    row = row_of("llama", build=build)
    assert (row["verdict"], row["why"]) == ("not built", "ImportError: a package is missing")


def test_a_model_that_needs_more_than_text_says_so():
    assert row_of("musicgen")["verdict"] == "not fed"


def test_a_fault_of_the_census_itself_is_named_in_its_row():
    def build(model_type, head):
        raise ZeroDivisionError("oops")

    row = row_of("llama", build=build)
    assert row["verdict"] == "failed"
    assert "ZeroDivisionError: oops" in row["why"]


def test_half_precision_is_held_to_its_distance_from_fp32():
    row = examine(CensusTask(model_type="llama", head="causal_lm", dtype="bfloat16"))
    assert row["verdict"] == "equal", row
    wrong = examine(CensusTask(model_type="llama", head="causal_lm", dtype="bfloat16"), build=with_fault)
    assert wrong["verdict"] == "wrong and not noticed", wrong


@pytest.mark.parametrize(("is_in_fp64", "verdict"), [(False, "equal"), (True, "different")])
def test_a_small_difference_is_rounding_only_if_fp64_does_not_have_it(monkeypatch, is_in_fp64, verdict):
    plain = worker.layout_step

    def leaking(model, *arguments):
        step = plain(model, *arguments)
        is_exact = next(model.parameters()).dtype == torch.float64
        amount = 3e-5 if is_in_fp64 or not is_exact else 0.0
        moved = [output + amount * output.norm(dim=-1, keepdim=True) for output in step.outputs]
        return replace(step, outputs=moved)

    model = tiny_model("llama", "causal_lm")
    patient = worker._admit(model, head_of(model), "train")
    monkeypatch.setattr(worker, "layout_step", leaking)
    found = worker._check(patient, "padded")
    assert found["outputs"] > 1e-5
    assert found["verdict"] == verdict
