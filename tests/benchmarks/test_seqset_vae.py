"""The benchmark of seqset_vae: its peer computes the same loss, and its table is whole."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.systems.seqset_vae import make_config, ratios, run_seqset
from benchmarks.systems.seqset_vae_methods import count_saved, loss_of, make_batches, note_loss_of, warmed_up
from tests.systems.seqset_vae.tiny_stays import make_model
from tests.systems.seqset_vae.tiny_stays import make_stays as draw_stays
from truebatch_systems.seqset_vae.config import LossConfig
from truebatch_systems.seqset_vae.data.admissions import make_stays
from truebatch_systems.seqset_vae.train.loss import SeqSetObjective


def test_one_call_a_set_gives_the_loss_and_the_gradient_of_one_call_a_micro_batch():
    stays = make_stays(draw_stays(6))
    model = make_model().train()
    objective = warmed_up(SeqSetObjective(loss=LossConfig(), class_weights=(1.0, 1.0)))
    found = []
    for loss in (
        loss_of(model, objective, make_batches(stays, range(6), 6)[0]),
        note_loss_of(model, objective, make_batches(stays, range(6), 1)),
    ):
        model.zero_grad()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss.item(), gradient))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert float((found[0][1] - found[1][1]).norm() / found[1][1].norm()) < 1e-5


def test_a_dry_run_writes_every_row_and_one_loss_curve(tmp_path):
    result = run_seqset(
        make_config(device="cpu", quick=True, seconds=1e9), out=tmp_path / "rows.json", say=lambda line: None
    )
    assert json.loads((tmp_path / "rows.json").read_text())["ratios"] == result["ratios"]
    assert [row["batch_size"] for row in result["rows"]] == [1, 4, 1]
    assert result["curves"]["largest_relative_difference"] < 1e-5
    assert not result["left_out"]
    assert (tmp_path / "rows.svg").read_text().count("<svg") == 1


def test_what_is_kept_for_backward_is_counted_once():
    x = torch.ones(100, requires_grad=True)
    with count_saved() as saved:
        (x.square() + x.square()).sum()
    assert saved.bytes == 400


def test_ratios_compare_equal_steps():
    rows = [
        {"way": "ours: a", "batch_size": 1, "stays_per_second": 2.0},
        {"way": "ours: a", "batch_size": 16, "stays_per_second": 20.0},
        {"way": "note: b", "batch_size": 1, "stays_per_second": 1.0},
    ]
    found = ratios(rows)
    assert found["batch 16 / our batch 1"] == 10.0
    assert found["batch 16 / the note's way"] == 20.0
