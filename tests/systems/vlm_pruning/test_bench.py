"""The benchmark runs as a whole, and what a step calls does not grow with the batch."""

from __future__ import annotations

import json

import pytest
import torch

from tests.systems.vlm_pruning.worlds import METHOD, batch_of, build, encode, samples
from truebatch.bench.vlm_pruning import make_config, ratios, run_pruning
from truebatch.systems.vlm_pruning import patches
from truebatch.systems.vlm_pruning.objective import PruningObjective
from truebatch.tensors.noise import noise_for


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
    normalise = patches.normalise
    monkeypatch.setattr(patches, "normalise", lambda *a: (count("pixels")(), normalise(*a))[1])
    with noise_for(batch, seed=0):
        PruningObjective(method=METHOD).sums(model, batch)
    for handle in handles:
        handle.remove()
    first = {f"layer {at}": 1 for at in range(2)}
    assert calls == {"tower": 1, "pixels": 1, **first, **{f"layer {at}": 2 for at in range(2, 6)}}
