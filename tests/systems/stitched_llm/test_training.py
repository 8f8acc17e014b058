"""Training: only what should be trained is, however a step is cut, and from wherever a run stopped."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from tests.systems.stitched_llm.conftest import SMALL
from tests.systems.stitched_llm.tiny_donors import llama, make_ids, pad, qwen2
from truebatch.errors import CheckpointError, ConfigError
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.train_system import Start, settings_type, train_system
from truebatch.training.trainer import train
from truebatch_systems.stitched_llm.config import StitchConfig, StitchTrain
from truebatch_systems.stitched_llm.data.vocab_map import read_vocabulary_map
from truebatch_systems.stitched_llm.model.build import _describe_start, build
from truebatch_systems.stitched_llm.model.donors import weights_hash
from truebatch_systems.stitched_llm.model.save_load import load_stitched
from truebatch_systems.stitched_llm.model.stitch import Cut, stitch
from truebatch_systems.stitched_llm.system import STITCHED_LLM
from truebatch_systems.stitched_llm.train.lstsq_init import Solution

pytestmark = pytest.mark.xdist_group("stitched_donors")


def settings(train=None, **given):
    kind = settings_type(STITCHED_LLM)
    quick = {"stuck_seconds": None, "batch_size": 32, "gradient_accumulation_steps": 1}
    return kind(**SMALL, **{"start_tokens": 1024, **given}, train=StitchTrain(**{**quick, **(train or {})}))


def samples_of(lengths, seed=0):
    return [{"input_ids": ids, "labels": ids} for ids in make_ids(lengths, seed)]


def run(model, *, lengths=(5, 60, 12, 33, 7, 20, 48, 9), **given):
    head = head_of(model)
    config = TrainConfig(samples_per_step=8, stuck_seconds=None, **given)
    return train(model, HeadObjective(head=head), TrainData(samples=samples_of(lengths), fields=head.fields), config)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_cut(layout):
    gradients, losses = [], []
    for batch in (1, 2, 4, 8):
        model = stitch(llama(), qwen2(), Cut(bottom=2, top=2))
        result = run(model, batch_size=batch, layout=layout, learning_rate=0.0, max_steps=1, max_grad_norm=None)
        gradients.append(torch.cat([p.grad.flatten() for p in model.adapter.parameters()]))
        losses.append(result.records[-1]["loss"])
    for gradient, loss in zip(gradients[1:], losses[1:], strict=True):
        assert float((gradient - gradients[0]).norm() / gradients[0].norm()) <= 1e-6
        assert abs(loss - losses[0]) <= 1e-6


def test_frozen_donors_are_bit_identical_after_twenty_steps():
    bottom, top = llama(), qwen2()
    before = weights_hash(bottom, top)
    model = stitch(bottom, top, Cut(bottom=2, top=2))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    adapter = model.adapter.linear.weight.detach().clone()
    result = run(model, batch_size=4, epochs=20, learning_rate=1e-2)
    assert result.step == 20
    assert weights_hash(bottom, top) == before
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert not torch.equal(adapter, model.adapter.linear.weight)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 64 * 96 + 96


def adapter_gradient(model):
    model.zero_grad()
    ids, is_real = pad(make_ids([14, 6, 9]))
    labels = ids.masked_fill(is_real == 0, -100)
    model(input_ids=ids, attention_mask=is_real, labels=labels).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.adapter.parameters()]).clone()


@pytest.mark.parametrize("reentrant", [False, True])
def test_computing_activations_again_does_not_change_the_gradient_and_skips_the_bottom(reentrant):
    model = stitch(llama(), qwen2(), Cut(bottom=2, top=2)).train()
    plain = adapter_gradient(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert all(layer.gradient_checkpointing for layer in model.top.layers)
    assert not any(layer.gradient_checkpointing for layer in model.bottom.layers)
    assert float((adapter_gradient(model) - plain).abs().max()) <= 1e-6


def test_a_run_is_resumed_bit_for_bit(cached, tmp_path):
    short = {"samples_per_step": 60, "epochs": 2, "save_every": 3, "schedule": "constant"}
    whole = train_system(STITCHED_LLM, settings(short), Start(out=tmp_path / "whole"))
    train_system(STITCHED_LLM, settings({**short, "max_steps": 3}), Start(out=tmp_path / "cut"))
    resumed = train_system(STITCHED_LLM, settings(short), Start(out=tmp_path / "cut"))
    assert whole.step == resumed.step == 8
    assert [r["loss"] for r in resumed.records] == [r["loss"] for r in whole.records[3:]]
    a, b = (load_stitched(tmp_path / name / "model").adapter.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_saved_adapter_gives_the_same_logits_and_refuses_other_donors(cached, tmp_path):
    train_system(STITCHED_LLM, settings({"max_steps": 2}), Start(out=tmp_path / "run"))
    folder = tmp_path / "run" / "model"
    model = load_stitched(folder)
    again = load_stitched(folder, bottom=cached / "bottom", top=cached / "top")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
    assert json.loads((folder / "mask_selftest.json").read_text())["is_right"]
    about = json.loads((folder / "stitch_config.json").read_text())
    assert about["trained"] == ["adapter.linear.bias", "adapter.linear.weight"]
    files = sorted(file.name for file in (tmp_path / "run").rglob("*.safetensors"))
    sizes = [file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors")]
    assert "adapter.safetensors" in files
    assert max(sizes) < 4 * 4 * (64 * 96 + 96)  # the adapter and its optimiser, no donor
    from transformers import AutoModelForCausalLM

    changed = AutoModelForCausalLM.from_pretrained(cached / "top")
    with torch.no_grad():
        changed.model.layers[3].mlp.up_proj.weight[0, 0] += 1e-3
    with pytest.raises(CheckpointError, match="not the one this adapter was trained on"):
        load_stitched(folder, bottom=cached / "bottom", top=changed)


@pytest.mark.parametrize(
    "given",
    [
        {"adapter": "low_rank", "rank": 8},
        {"adapter": "mlp", "inner": 16, "norm": True},
        {"also_train": ("norms", "head", "first_layers")},
        {"lora": True},
        {"stored": "int8"},
        {"start": "random"},
        {"start": "identity"},
        {"vocabulary": "by_text"},
    ],
    ids=str,
)
def test_every_way_of_joining_trains_and_is_saved_and_loaded(cached, tmp_path, given):
    if given.get("stored") == "int8":
        pytest.importorskip("torchao")
    result = train_system(STITCHED_LLM, settings({"max_steps": 3}, **given), Start(out=tmp_path / "run"))
    assert result.step == 3
    assert result.records[-1]["loss"] < result.records[0]["loss"] + 0.3
    model = load_stitched(tmp_path / "run" / "model")
    trained = {name for name in model.state_dict() if name.startswith("adapter.")}
    assert trained


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_donors_carry_an_adapter_in_full_precision(cached, tmp_path, precision, dtype):
    config = settings({"max_steps": 2, "precision": precision, "learning_rate": 1e-3})
    built = build(config)
    assert next(built.model.top.parameters()).dtype == dtype
    assert built.model.adapter.linear.weight.dtype == torch.float32
    result = train_system(STITCHED_LLM, config, Start(out=tmp_path / "run"))
    assert result.records[-1]["loss"] < result.records[0]["loss"] + 0.3


def test_compare_runs_both_ways_and_off_runs_one_by_one(cached, tmp_path):
    for switch in ("compare", "off"):
        config = settings({"max_steps": 2, "true_batch": switch, "samples_per_step": 8, "limit": 16})
        lines = []
        train_system(STITCHED_LLM, config, Start(out=tmp_path / switch, say=lines.append))
        assert switch == "off" or any("differ from one by one by" in line for line in lines)


def test_int8_donors_without_torchao_are_refused_with_the_command_to_install_it(cached, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match=r"(?s)need the package torchao.*truebatch\[quant\]"):
        build(settings(stored="int8"))


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"(?s)go together.*without top, data"):
        StitchConfig(bottom="x")
    with pytest.raises(ConfigError, match="start_tokens must be at least 1"):
        StitchConfig(start_tokens=0)
    with pytest.raises(ConfigError, match="cut_bottom must be at least 1"):
        StitchConfig(cut_bottom=0)
    with pytest.raises(ConfigError, match="cut_top must be at least 0"):
        StitchConfig(cut_top=-1)
    with pytest.raises(ConfigError, match="no other start"):
        StitchConfig(adapter="identity")
    with pytest.raises(ConfigError, match="nothing would be trained"):
        StitchConfig(adapter="identity", start="identity")
    with pytest.raises(ConfigError, match="also_train is not known"):
        StitchConfig(also_train=("everything",))


@pytest.mark.parametrize(
    "text", ['{"1": -5}', '{"1": 3.7}', '{"1": true}', '{"1": "2"}', '{"x": 2}', "[1]", "{", '{"9": 1}']
)
def test_a_map_that_would_name_another_token_without_a_word_is_refused(tmp_path, text):
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(ConfigError, match=r"map\.json"):
        read_vocabulary_map(tmp_path / "map.json", size=5)
    (tmp_path / "map.json").write_text('{"1": 7, "4": 0}')
    assert read_vocabulary_map(tmp_path / "map.json", size=5).tolist() == [-1, 7, -1, -1, 0]


def test_a_start_on_few_tokens_says_so():
    nothing = torch.zeros(1)
    found = Solution(nothing, nothing, 0.25, nothing, nothing, 255)
    assert _describe_start(found, 64).endswith("on 255 tokens, which are few: it fits 64 dimensions, give 256 or more")
    assert _describe_start(replace(found, count=256), 64) == "lstsq start: residual 0.250 on 256 tokens"
