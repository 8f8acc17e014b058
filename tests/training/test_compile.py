"""Compiled layers train as written ones do, and ragged data never compiles anything again."""

import copy
import os

import numpy as np
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.tiny import counting_backend
from truebatch.batch import torch_compile
from truebatch.batch.collate import collate
from truebatch.batch.segments import most_segments, packed_segments
from truebatch.batch.torch_compile import compile_layers, has_compiled_layers, repeated_layers, uncompile_layers
from truebatch.errors import ConfigError
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import packed_row, padded_rows
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.trainer import train
from truebatch_systems.chinese_gpt.data.samples import FIELDS
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape
from truebatch_systems.chinese_gpt.train.objective import NextToken

CELLS = 40

# The compiler of torch looks at the gradient of every tensor it is given, and warns of that itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture
def graphs(monkeypatch):
    torch.compiler.reset()
    seen, count = counting_backend()
    monkeypatch.setattr(torch_compile, "BACKEND", count)
    return seen


def samples_of(vocabulary, number=24):
    random = np.random.default_rng(0)
    lengths = np.minimum(random.geometric(0.12, number), CELLS)
    return [{"input_ids": random.integers(1, vocabulary, length), "labels": None} for length in lengths]


def run(*, compiled, **settings):
    model = tiny_model("llama")
    head = head_of(model)
    samples = [{**s, "labels": s["input_ids"]} for s in samples_of(model.config.vocab_size)]
    data = TrainData(samples=samples, fields=head.fields, validation=samples[:5])
    config = TrainConfig(
        layout="packed", cells=CELLS, samples_per_step=8, epochs=2, learning_rate=1e-2, compile=compiled, **settings
    )
    result = train(model, HeadObjective(head=head), data, config)
    return model, result


def test_ragged_rows_compile_once_and_train_as_written_layers_do(graphs):
    written, plain = run(compiled=False)
    assert not graphs
    model, result = run(compiled=True)
    assert len(graphs) == 1
    assert result.step == plain.step == 6
    assert len({record["fill"] for record in result.records}) > 1
    for (name, one), other in zip(model.named_parameters(), written.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_rows_of_several_widths_compile_once_each_and_are_nearly_full(graphs):
    model = tiny_model("llama")
    head = head_of(model)
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(3.6, 0.9, 160), 2, 512).astype(int)
    samples = [{"input_ids": random.integers(1, model.config.vocab_size, n)} for n in lengths]
    data = TrainData(samples=[{**s, "labels": s["input_ids"]} for s in samples], fields=head.fields)
    config = TrainConfig(layout="packed", cells=1024, samples_per_step=40, epochs=2, compile=True)
    widths = config.plan_config(lengths).row_widths
    lines = []
    result = train(model, HeadObjective(head=head), data, config, say=lines.append)
    assert 1 < len(widths) < 8
    assert len(graphs) <= len(widths)
    assert min(record["fill"] for record in result.records) > 0.9
    assert any(line.startswith(f"compiled rows: {len(widths)} width(s)") for line in lines)


def test_compilations_are_kept_where_the_user_says_else_in_our_cache(graphs, monkeypatch, tmp_path):
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    compile_layers(tiny_model("llama"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"
    for names_none in (monkeypatch.delenv, lambda name: monkeypatch.setenv(name, default_cache_dir())):
        names_none("TORCHINDUCTOR_CACHE_DIR")
        compile_layers(tiny_model("llama"))
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")


def run_own(*, compiled, dropout, layers=10):
    """A model that calls `attend` itself, with dropout that belongs to samples."""
    shape = ModelShape(
        vocabulary=50, embedding_dim=16, heads=2, hidden_dim=32, layers=layers, max_seq_len=CELLS, dropout=dropout
    )
    model = ChineseGPT(shape)
    samples = [{**s, "labels": s["input_ids"]} for s in samples_of(50)]
    data = TrainData(samples=samples, fields=FIELDS, validation=samples[:5])
    config = TrainConfig(
        layout="packed", cells=CELLS, samples_per_step=8, epochs=2, learning_rate=1e-2, compile=compiled
    )
    return model, train(model, NextToken(), data, config)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_model_of_ones_own_compiles_once_too(graphs, dropout):
    written, plain = run_own(compiled=False, dropout=dropout)
    assert not graphs
    model, result = run_own(compiled=True, dropout=dropout)
    assert len(graphs) == 1
    assert [record["loss"] for record in result.records] == pytest.approx([r["loss"] for r in plain.records], rel=1e-5)
    for (name, one), other in zip(model.named_parameters(), written.named_parameters(), strict=True):
        torch.testing.assert_close(one, other[1], rtol=1e-4, atol=1e-4, msg=name)


def test_comparing_with_one_by_one_does_not_compile_every_sample(graphs):
    run(compiled=True, true_batch="compare", compare_steps=1, max_steps=2)
    assert len(graphs) == 1


@pytest.mark.parametrize("wrong", [{"layout": "padded"}, {"cells": None}, {"true_batch": "off"}])
def test_rows_of_many_shapes_are_not_compiled(wrong):
    with pytest.raises(ConfigError, match="one shape"):
        TrainConfig(**{"layout": "packed", "cells": 64, "compile": True, **wrong})


def test_layers_are_the_members_of_the_outermost_lists(graphs):
    model = tiny_model("llama")
    assert list(repeated_layers(model)) == list(model.model.layers)
    assert compile_layers(model) == len(model.model.layers)
    assert has_compiled_layers(model)
    uncompile_layers(model)
    assert not has_compiled_layers(model)
    with pytest.raises(ConfigError, match="no list of layers"):
        compile_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("cells", [40, 300, 1000])
def test_no_row_has_more_segments_than_its_table_has_slots(cells):
    lengths = [1, 1, 2, 3, 5, 8, 40, 13, 21]
    slots = most_segments(lengths, cells)
    for number in range(len(lengths) + 1):
        chosen = sorted(lengths)[:number]
        if sum(chosen) <= cells:
            assert len(packed_segments(chosen, cells=cells, slots=slots).starts) == slots + 1


def test_a_window_that_attention_is_not_told_of_is_kept_by_group_under_compiled_layers(graphs, monkeypatch):
    model = tiny_model("mistral")
    for layer in model.model.layers:
        monkeypatch.delattr(layer.self_attn, "sliding_window", raising=False)
    twin, head = copy.deepcopy(model), head_of(model)
    samples = sorted(samples_of(model.config.vocab_size), key=lambda s: -len(s["input_ids"]))[:3]
    samples = [{**s, "labels": s["input_ids"]} for s in samples]
    assert len(samples[-1]["input_ids"]) > model.config.sliding_window
    alone = [collate([s], padded_rows(np.arange(1), len(s["input_ids"])), head.fields) for s in samples]
    expected = sum(HeadObjective(head=head).sums(twin, batch)["nll"] for batch in alone)
    plain = type(model.model.layers[0].self_attn).forward

    def forward(self, *args, **given):
        attend = ALL_ATTENTION_FUNCTIONS["truebatch"]
        monkeypatch.setitem(
            ALL_ATTENTION_FUNCTIONS._global_mapping,
            "truebatch",
            lambda *a, sliding_window=None, **k: attend(*a, **k),
        )
        try:
            return plain(self, *args, **given)
        finally:
            monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "truebatch", attend)

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", forward)
    compile_layers(model)
    batch = collate(samples, packed_row(np.arange(3), CELLS * 3), head.fields)
    torch.testing.assert_close(HeadObjective(head=head).sums(model, batch)["nll"], expected)
