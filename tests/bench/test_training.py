"""The training benchmark compares like with like, says what it left out, and its ratios are of what they say."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from truebatch.bench import training
from truebatch.bench.training import run_training
from truebatch.bench.training_settings import Case, TrainingBenchConfig, make_config
from truebatch.bench.training_table import ratios, table
from truebatch.bench.training_ways import EVERY_CASE, LIGER, TRL, WAYS, all_ways, compare_gradients
from truebatch.bench.training_work import make_work
from truebatch.errors import ConfigError
from truebatch.hf.heads import head_of
from truebatch.hf.shapes import SHAPES, build_model, matrix_flops_per_token

SIZES = {"longest": 60, "cells": 200, "slots": 64}

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(scope="module", params=["qwen2-tiny", "bert-tiny"])
def prepared(request):
    shape = SHAPES[request.param]
    model = build_model(shape, longest=60, device="cpu", dtype=torch.float32)
    return model, make_work(head_of(model), shape, "chat", num=64, **SIZES)


def test_every_way_has_the_tokens_of_its_samples_and_runs_them(prepared):
    model, work = prepared
    torch.compiler.reset()
    for way in all_ways(model, work, device=torch.device("cpu"), backend="eager"):
        batches = list(way.batches())
        assert batches, way.name
        for batch in batches[:2]:
            ids = getattr(batch, "sample_ids", None)
            if ids is not None and "uniform" not in way.name:
                assert way.tokens(batch) == int(work.lengths[list(ids)].sum()), way.name
            assert way.tokens(batch) <= way.cells(batch)
        model.zero_grad()
        with way.around():
            way.run(batches[0])
        assert all(p.grad is not None for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_ways_of_hugging_face_take_every_label_that_ours_takes(prepared):
    model, work = prepared
    batch = work.chunks(8, by_length=False)[0]
    ways = {way.name: way for way in all_ways(model, work, device=torch.device("cpu"), backend="eager")}
    found = []
    for name in ("HF default, 8", "ours padded"):
        model.zero_grad()
        ways[name].run(batch)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    cosine = torch.nn.functional.cosine_similarity(*found, dim=0)
    assert float(cosine) > 1 - 1e-5  # they are divided by different counts, and else the same


def test_a_packed_row_has_the_gradient_of_its_samples(prepared):
    model, work = prepared
    found = compare_gradients(model, work, torch.device("cpu"))
    assert found["gradient"] < 1e-5
    assert found["packed to fp32"] < 1e-5
    assert found["one by one to fp32"] == 0
    assert [far for _, far in found["farthest samples"]] == [0] * min(8, found["samples"])


def test_even_samples_cost_as_many_pairs_a_token_as_ragged_ones(prepared):
    _, work = prepared
    lengths = work.lengths.astype(float)
    assert abs(work.uniform_length - np.square(lengths).sum() / lengths.sum()) <= 4


def test_one_case_is_measured_written_and_shown(tmp_path):
    config = TrainingBenchConfig(
        cells=120, longest=40, samples=40, step_tokens=500, way_seconds=0.0, thinned=8, backend="eager",
        cases=(Case("qwen2-tiny", "patient"),), seconds=100,
    )  # fmt: skip
    lines = []
    result = run_training(config, out=tmp_path / "t.json", say=lines.append)
    assert json.loads((tmp_path / "t.json").read_text())["ratios"] == result["ratios"]
    found = result["ratios"]["qwen2-tiny/patient"]
    assert found["ours packed / one by one"] > 0
    assert any("ours packed, compiled" in line for line in lines)
    assert all(row["compilations"] == 0 for row in result["rows"])  # nothing compiles after the warm-up


SMALL = {
    "cells": 120, "longest": 40, "samples": 40, "step_tokens": 500, "way_seconds": 0.0, "thinned": 8,
    "backend": "eager", "seconds": 100,
}  # fmt: skip


@pytest.fixture
def fast_peak(monkeypatch):
    """The matrix rate of this machine is not measured."""
    monkeypatch.setattr(training, "measure_peak", lambda _: 0.1)


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for Liger: it marks the instance, and transformers' own module for every model after."""
    from transformers.models.qwen2 import modeling_qwen2

    def apply(*, model):
        model.is_marked = True
        monkeypatch.setattr(modeling_qwen2, "is_marked", True, raising=False)

    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["liger_kernel.transformers.monkey_patch"]._apply_liger_kernel_to_instance = apply
    return modeling_qwen2


def test_only_ligers_own_rows_see_its_kernels(liger, fast_peak, monkeypatch):
    seen = []
    time_rounds = training.time_rounds

    def watch(way, *args, **kwargs):
        seen.append((way.name, getattr(liger, "is_marked", False)))
        return time_rounds(way, *args, **kwargs)

    monkeypatch.setattr(training, "time_rounds", watch)
    cases = (Case("qwen2-tiny", "chat", True), Case("qwen2-tiny", "patient"))
    ways = ("one by one", "ours packed", *LIGER)
    run_training(TrainingBenchConfig(**SMALL, cases=cases, ways=ways), say=lambda _: None)
    assert {name for name, _ in seen} == set(ways)
    assert all(is_marked == name.startswith("Liger") for name, is_marked in seen)


def test_named_ways_alone_are_measured(fast_peak):
    config = TrainingBenchConfig(**SMALL, cases=(Case("qwen2-tiny", "patient", True),), ways=("uniform", "ours padded"))
    result = run_training(config, say=lambda _: None)
    assert [row["way"] for row in result["rows"]] == ["ours padded", "uniform"]
    assert "equality" not in result
    assert set(result["work"]["qwen2-tiny/patient"]["seconds_of_ways"]) == {"ours padded", "uniform"}


def test_ways_are_named_with_commas_although_names_hold_some():
    named = "uniform, our kernel, compiled,ours packed, uniform, HF default, 8"
    assert make_config(device="cpu", ways=named).ways == (
        "HF default, 8", "ours packed", "uniform", "uniform, our kernel, compiled"
    )  # fmt: skip
    assert make_config(device="cpu").ways == ()
    with pytest.raises(ConfigError, match="no such way; did you mean 'ours packed'"):
        make_config(device="cpu", ways="uniform,our packed")


def test_a_way_runs_beside_its_limit_and_every_name_is_known(prepared):
    model, work = prepared
    names = [way.name for way in all_ways(model, work, device=torch.device("cpu"), backend="eager")]
    assert names == [name for name in WAYS if name not in (TRL, *LIGER)]
    for order in (WAYS, EVERY_CASE):
        for way in ("ours packed", "ours packed, compiled"):
            assert order[order.index(way) + 1] == way.replace("ours packed", "uniform")


def test_later_cases_time_fewer_micro_batches_of_other_ways_and_rows_say_so(fast_peak):
    cases = (Case("qwen2-tiny", "chat", True), Case("qwen2-tiny", "patient"))
    config = TrainingBenchConfig(**{**SMALL, "thinned": 4}, cases=cases, ways=("one by one", "ours packed"))
    rows = run_training(config, say=lambda _: None)["rows"]
    assert [row["micro_batches"] for row in rows] == [4, 1, 2, 1]


def test_an_encoder_has_no_ways_of_causal_models():
    config = TrainingBenchConfig(ways=("uniform", TRL, *LIGER))
    assert config.ways_of(Case("bert-tiny", "chat")) == ("uniform",)


def test_what_there_was_no_time_for_is_named(fast_peak):
    config = TrainingBenchConfig(cases=(Case("qwen2-tiny", "chat"),), seconds=-1.0)
    lines = []
    result = run_training(config, say=lines.append)
    assert result["left_out"] == ["qwen2-tiny/chat: out of time"]
    assert lines[-1] == "left out: qwen2-tiny/chat: out of time"


def test_ratios_are_of_what_they_say():
    speeds = {"one by one": 1.0, "HF default, 8": 5.0, "ours packed": 40.0, "uniform": 50.0}
    rows = [
        {"case": "a/b", "way": way, "tokens_per_second": speed, "peak_gib": 80.0 / speed, "share_of_peak": 0.5,
         "fill": 1.0, "compilations": 0, "updating_each": speed / 2, "new_shapes": speed}
        for way, speed in speeds.items()
    ]  # fmt: skip
    found = ratios(rows)
    assert found == {
        "a/b": {
            "ours packed / uniform": 0.8,
            "ours packed / HF default, 8": 8.0,
            "ours packed / one by one": 40.0,
            "new shapes: ours packed / HF default, 8": 8.0,
            "new shapes: ours packed / one by one": 40.0,
            "one update a micro-batch: ours packed / HF default, 8": 8.0,
            "one update a micro-batch: ours packed / one by one": 40.0,
            "memory, ours packed / HF default, 8": 0.125,
        }
    }
    assert table({"ratios": found, "rows": rows, "left_out": []})[2] == "     0.800  ours packed / uniform"


def test_operations_are_counted_from_the_weights():
    shape = SHAPES["bert-tiny"]
    model = build_model(shape, longest=60, device="cpu", dtype=torch.float32)
    layer = 4 * 128 * 128 + 2 * 128 * 512
    assert matrix_flops_per_token(model) == 6 * (2 * layer + 128 * 128 + 128 * 1024)
    assert matrix_flops_per_token(model, labelled=0.25) == 6 * (2 * layer + 128 * 128 + 128 * 256)


@pytest.mark.parametrize("wrong", [{"device": "tpu"}, {"device": "cpu", "only": "llama-9b/chat"}])
def test_unknown_devices_and_cases_are_refused(wrong):
    with pytest.raises(ConfigError):
        make_config(**wrong)


def test_rows_that_cannot_hold_the_longest_sample_are_refused():
    assert make_config(device="cpu", cells=4096).cells == 4096
    with pytest.raises(ConfigError, match="a row must hold the longest sample"):
        make_config(device="cpu", cells=100)
