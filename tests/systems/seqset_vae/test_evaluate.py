"""Predictions, figures and latents of a model: however stays are batched, in the order of the stays."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

from truebatch.errors import DataError
from truebatch_systems.seqset_vae.config import GeneratorConfig, ModelConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import take_stays
from truebatch_systems.seqset_vae.data.prepare import prepare, stays_cut_at
from truebatch_systems.seqset_vae.data.transform import cut_stays
from truebatch_systems.seqset_vae.eval.evaluate import evaluate, export_latents, find_latents, predict
from truebatch_systems.seqset_vae.eval.metrics import auroc
from truebatch_systems.seqset_vae.model.model import SeqSetVAE

MODEL = ModelConfig(embedding_dim=12, reduced_dim=8, latent_dim=8, inducing_points=2, feedforward_dim=8)
CONFIG = SeqSetConfig(
    generator=GeneratorConfig(stays=60, median_hours=30.0, positives=0.4), model=MODEL, test_share=0.5, max_events=600
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return SeqSetVAE(MODEL, torch.from_numpy(prepare(CONFIG).variables.vectors)).eval()


def test_probabilities_are_those_of_one_stay_at_a_time_in_their_order(model):
    test = prepare(CONFIG).test
    together = predict(model, test)
    np.testing.assert_allclose(together.sum(axis=1), 1.0)
    np.testing.assert_allclose(predict(model, test, cells=1), together, atol=1e-6)
    order = np.random.default_rng(0).permutation(len(test))
    np.testing.assert_allclose(predict(model, take_stays(test, order)), together[order], atol=1e-6)


def test_latents_are_those_of_one_stay_at_a_time(model):
    test = take_stays(prepare(CONFIG).test, range(6))
    together, alone = find_latents(model, test), find_latents(model, test, cells=1)
    assert together.mean.shape == (test.num_sets.sum(), 8)
    for name in ("mean", "logvar", "state"):
        np.testing.assert_allclose(getattr(together, name), getattr(alone, name), atol=1e-5)


def test_evaluation_writes_predictions_and_judges_the_first_hours(model, tmp_path):
    test = prepare(CONFIG).test
    figures = evaluate(CONFIG, prepare(CONFIG), model, test, tmp_path)
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == list(test.ids)
    labels = np.array([int(row["label"]) for row in rows])
    assert figures["auroc"] == pytest.approx(
        auroc(labels, np.array([float(row["probability"]) for row in rows])), abs=1e-6
    )
    low, high = figures["auroc_interval"]
    assert low <= figures["auroc"] <= high
    with (tmp_path / "calibration.csv").open() as file:
        assert sum(int(row["stays"]) for row in csv.DictReader(file)) == len(test)
    assert (tmp_path / "calibration.svg").read_text().startswith("<svg")
    day = figures["after_hours"]["24"]
    lasting = test.set_minute[test.set_starts[1:] - 1] >= 24 * 60
    assert day["stays"] == lasting.sum() < figures["stays"]
    assert evaluate(CONFIG, prepare(CONFIG), model, test, tmp_path) == figures


def test_a_cut_knows_nothing_of_what_comes_later(model):
    whole = prepare(SeqSetConfig(generator=CONFIG.generator, model=MODEL, test_share=0.5)).test
    known = stays_cut_at(CONFIG, 6.0, "test")
    by_hand, _ = cut_stays(whole, first_hours=6.0, max_events=CONFIG.max_events)
    np.testing.assert_array_equal(known.set_minute, by_hand.set_minute)
    np.testing.assert_array_equal(known.val, by_hand.val)
    assert known.set_minute.max() < 360


def test_all_latents_are_exported_with_the_place_of_every_set(model, tmp_path):
    numbers = export_latents(prepare(CONFIG), model, tmp_path / "deep" / "latents.npz")
    ready = prepare(CONFIG)
    with np.load(tmp_path / "deep" / "latents.npz") as saved:
        for split, stays in ready.splits.items():
            assert numbers[split] == len(saved[f"{split}/state"]) == saved[f"{split}/starts"][-1]
            assert saved[f"{split}/ids"].tolist() == list(stays.ids)


def test_a_pretrained_model_is_not_judged_by_a_head_it_never_trained(model, tmp_path):
    config = SeqSetConfig(generator=CONFIG.generator, model=MODEL, mode="pretrain")
    with pytest.raises(DataError, match="no classifier to judge"):
        evaluate(config, prepare(config), model, prepare(config).test, tmp_path)
