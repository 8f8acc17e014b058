"""The demo shows equality because it is there, and would say so if it were not."""

from __future__ import annotations

import numpy as np
import torch

from truebatch.cli import run
from truebatch.demo import TinyCausalModel, cut_one_step, make_samples, run_cut


def test_the_demo_ends_well_and_shows_its_three_parts(capsys):
    assert run(["demo"]) == 0
    out = capsys.readouterr().out
    for word in (
        "1. Plans",
        "bucketed",
        "2. One step",
        "padded left",
        "packed, 3 ranks",
        "3. Equal",
        "next: truebatch plan",
    ):
        assert word in out


def test_a_model_that_breaks_the_law_ends_with_exit_code_1(capsys, monkeypatch):
    forward = TinyCausalModel.forward

    def mixing(self, batch):
        logits = forward(self, batch)
        return logits + 1e-2 * logits.mean(dim=(0, 1))

    monkeypatch.setattr(TinyCausalModel, "forward", mixing)
    assert run(["demo"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_every_cut_holds_the_same_samples():
    cuts = cut_one_step(make_samples(3), seed=3)
    ids = [sorted(i for batch in cut.batches for i in batch.sample_ids) for cut in cuts]
    assert all(one == ids[0] for one in ids)
    assert len(cuts[0].batches) == len(ids[0]) > len(cuts[1].batches) > 1


def test_samples_depend_on_the_seed_alone():
    one, again, other = make_samples(0, 50), make_samples(0, 50), make_samples(1, 50)
    assert all(np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, other, strict=True))


def test_a_cut_gives_the_gradient_of_the_whole_step():
    torch.manual_seed(0)
    model = TinyCausalModel(width=16, heads=2, layers=1)
    cuts = cut_one_step(make_samples(1), seed=1)
    alone, packed = (run_cut(model, cut, repeats=1).gradients for cut in (cuts[0], cuts[3]))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)
