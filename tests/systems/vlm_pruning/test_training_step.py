"""The benchmark runs as a whole, and what a step calls does not grow with the batch."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.vlm_pruning.parts import run_part
from benchmarks.vlm_pruning.quality import summary as quality_summary
from benchmarks.vlm_pruning.rows import ratios
from benchmarks.vlm_pruning.run import make_config, run_pruning
from benchmarks.vlm_pruning.sizes import summary as sizes_summary
from tests.systems.vlm_pruning.worlds import METHOD, batch_of, build, encode, samples
from truebatch.batch.keyed_random import noise_for
from truebatch.errors import ConfigError
from truebatch_systems.vlm_pruning.backbones import llava
from truebatch_systems.vlm_pruning.train.objective import PruningObjective


def test_a_dry_run_measures_every_row_and_writes_them(tmp_path):
    said: list[str] = []
    threads = torch.get_num_threads()
    result = run_pruning(make_config(quick=True), out=tmp_path / "out.json", say=said.append)
    torch.set_num_threads(threads)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ratios"] == pytest.approx(result["ratios"])
    assert len(written["rows"]) == 12
    assert not written["left_out"]
    assert set(written["generation"]) == {"origin", "hard"}
    assert written["generation"]["hard"]["cache_bytes"] < written["generation"]["origin"]["cache_bytes"]
    assert written["ratios"].items() >= ratios(written["rows"]).items()


@pytest.mark.parametrize("number", [1, 4])
def test_a_step_looks_at_all_images_at_once_and_runs_each_layer_at_most_twice(number, monkeypatch):
    model = build().train()
    batch = batch_of(encode(samples(number)))
    calls: dict[str, int] = {}

    def count(name):
        return lambda *_args: calls.update({name: calls.get(name, 0) + 1})

    handles = [model.backbone.model.vision_tower.register_forward_pre_hook(count("tower"))]
    for at, layer in enumerate(model.backbone.model.language_model.layers):
        handles.append(layer.register_forward_pre_hook(count(f"layer {at}")))
    normalise = llava.normalise
    monkeypatch.setattr(llava, "normalise", lambda *a: (count("pixels")(), normalise(*a))[1])
    with noise_for(batch, seed=0):
        PruningObjective(method=METHOD).sums(model, batch)
    for handle in handles:
        handle.remove()
    first = {f"layer {at}": 1 for at in range(2)}
    assert calls == {"tower": 1, "pixels": 1, **first, **{f"layer {at}": 2 for at in range(2, 6)}}


def asked(**changes):
    return {"device": "cpu", "seeds": "0,1", "seconds": None, "quick": False, **changes}


@pytest.mark.parametrize(
    ("part", "options", "said"),
    [
        ("qualty", {}, "did you mean 'quality'"),
        ("quality", {"device": "cuda"}, "on a CPU"),
        ("sizes", {"seconds": 5.0}, "to the end"),
        ("quality", {"seeds": "a,b"}, "whole numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_trained(part, options, said):
    with pytest.raises(ConfigError, match=said):
        run_part(part, asked(**options), out=None, say=print)


def test_a_summary_says_the_worst_of_all_seeds_and_gives_other_ways_more_tokens_than_ours():
    rows = [
        {"seed": 0, "backbone_accuracy": 0.92, "pruned_accuracy": 0.91, "points_lost": 1.0, "tokens_kept": 0.28},
        {"seed": 1, "backbone_accuracy": 0.95, "pruned_accuracy": 0.93, "points_lost": 2.0, "tokens_kept": 0.26},
    ]
    curve = [
        {"seed": seed, "way": way, "tokens_kept": kept, "accuracy": accuracy}
        for seed in (0, 1)
        for way, kept, accuracy in (("learned", 0.27, 0.9), ("random", 0.27, 0.7), ("random", 0.32, 0.8))
    ]
    found = quality_summary(rows, curve)
    assert found["least accuracy of a backbone"] == 0.92
    assert (found["most points lost"], found["most tokens kept"]) == (2.0, 0.28)
    assert found["least points ahead of random"] == pytest.approx(11.0)


def test_auto_is_compared_with_every_fixed_size():
    rows = [
        {"size": "auto", "accuracy": 0.9, "vision_tokens": 40.0},
        {"size": "112", "accuracy": 0.91, "vision_tokens": 64.0},
    ]
    found = sizes_summary(rows)
    assert found["points ahead of 112"] == pytest.approx(-1.0)
    assert found["tokens / tokens of 112"] == 0.625
    assert sizes_summary(rows[1:]) == {}
