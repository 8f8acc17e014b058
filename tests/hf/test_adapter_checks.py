"""Adapters from somebody else: nothing is imported, unpickled, fetched or searched without an end."""

from __future__ import annotations

import json
import sys

import pytest
from safetensors.torch import save_file

from truebatch.errors import DataError, TruebatchError
from truebatch.hf.adapter_checks import check_adapter
from truebatch.hf.load import without_chatter
from truebatch.hf.model_folders import load_engine
from truebatch.testing.tiny_hf.model import tiny_model

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    with without_chatter():
        tiny_model("llama").save_pretrained(folder / "base")
        model = tiny_model("llama")
        model.add_adapter(peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.save_pretrained(folder / "adapter")
    return folder


def changed(adapter, **values):
    path = adapter / "adapter" / "adapter_config.json"
    kept = path.with_name("kept.json")
    if not kept.exists():
        kept.write_text(path.read_text())
    values = {**json.loads(kept.read_text()), "base_model_name_or_path": str(adapter / "base"), **values}
    path.write_text(json.dumps(values))
    return adapter / "adapter"


PLAIN = {"megatron_config": None, "r": 2, "rank_pattern": {}, "alpha_pattern": {}, "target_modules": ["q_proj"]} | {
    "init_lora_weights": True, "layer_replication": None, "peft_type": "LORA", "exclude_modules": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"megatron_config": {"a": 1}, "megatron_core": "evil_adapter_module"},
        {"r": 10**9},
        {"r": 3},
        {"r": -1},
        {"r": "2"},
        {"rank_pattern": {"q_proj": 10**9}},
        {"rank_pattern": {"(([a-z_.0-9]+)+)+!": 2}},
        {"alpha_pattern": {"(a|a)*b": 2}},
        {"alpha_pattern": [1]},
        {"target_modules": "(([a-z_.0-9]+)+)+!"},
        {"target_modules": "(.*)(.*)(.*)(.*)(.*)x"},
        {"target_modules": r"([a-z]*)\1x"},
        {"target_modules": [1]},
        {"exclude_modules": "(a?)+b"},
        {"layers_pattern": "(([a-z_.0-9]+)+)+!"},
        {"init_lora_weights": "pissa_niter_1000000"},
        {"init_lora_weights": "corda", "corda_config": {"cache_file": "/etc/passwd"}},
        {"layer_replication": [[0, 10**7]]},
        {"peft_type": "P_TUNING"},
        {"peft_type": ["LORA"]},
        {"peft_type": "XLORA", "adapters": {"0": "someone/evil"}},
    ],
    ids=lambda values: str(values)[:50],
)
def test_a_setting_that_plain_lora_has_not_is_refused(adapter, values, tmp_path, monkeypatch):
    (tmp_path / "evil_adapter_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = changed(adapter, **{**PLAIN, **values})
    with pytest.raises(DataError, match="a setting that is not read"):
        load_engine(folder)
    assert "evil_adapter_module" not in sys.modules


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"target_modules": r"^(?!.*vision).*(q_proj|v_proj).*$"},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 3}},
        {"init_lora_weights": "gaussian"},
    ],
    ids=lambda values: str(values)[:50],
)
def test_an_adapter_as_peft_saves_it_is_loaded(adapter, values):
    folder = changed(adapter, **{**PLAIN, **values})
    check_adapter(folder)
    if "target_modules" not in values:
        assert any("lora" in name for name, _ in load_engine(folder).named_parameters())


@pytest.mark.parametrize("base", ["someone/model", "https://example.org/x", "a\0b", "x" * 5000, ["base"], None])
def test_a_base_that_is_no_folder_is_refused(adapter, base):
    folder = changed(adapter, **PLAIN, base_model_name_or_path=base)
    with pytest.raises(TruebatchError, match="not a folder here"):
        load_engine(folder)


def test_settings_that_are_no_json_and_weights_that_are_none_are_named(adapter, tmp_path):
    for text in ("[1]", "{", '{"a":' * 100_000):
        (tmp_path / "adapter_config.json").write_text(text)
        save_file({}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(DataError, match="cannot be read"):
            load_engine(tmp_path)
    folder = changed(adapter, **PLAIN)
    (tmp_path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle" * 9)
    with pytest.raises(DataError, match="not a whole safetensors file"):
        load_engine(tmp_path)
