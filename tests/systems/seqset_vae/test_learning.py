"""What the model learns where the truth is known: events of a set, and a planted risk. Minutes, so not by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.systems.seqset_vae.tiny_stays import batch_of
from truebatch.objective import divide_once
from truebatch.systems.seqset_vae.beside import probe_signals
from truebatch.systems.seqset_vae.loading import prepare
from truebatch.systems.seqset_vae.model import SeqSetVAE
from truebatch.systems.seqset_vae.objective import SeqSetObjective, look_at
from truebatch.systems.seqset_vae.settings import DetectorConfig, GeneratorConfig, LossConfig, ModelConfig
from truebatch.systems.seqset_vae.system import SEQSET_VAE
from truebatch.tensors.noise import noise_for
from truebatch.training.starting import Start, settings_type, train_system
from truebatch.training.trained import open_trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.xdist_group("seqset_learning")]

CLUSTERS, VARIABLES = 6, 20


def clustered_stays(number: int, *, seed: int) -> list[dict[str, Any]]:
    """Stays whose sets are of one of six kinds: a panel of variables of its own, around values of its own."""
    kinds = np.random.default_rng(99)
    panels = [kinds.choice(VARIABLES, size=kinds.integers(3, 7), replace=False) for _ in range(CLUSTERS)]
    centres = [2 * kinds.standard_normal(len(panel)) for panel in panels]
    rng = np.random.default_rng(seed)
    stays = []
    for _ in range(number):
        kind = rng.integers(0, CLUSTERS, rng.integers(4, 10))
        sizes = [len(panels[k]) for k in kind]
        values = [centres[k] + 0.2 * rng.standard_normal(len(panels[k])) for k in kind]
        minutes = np.cumsum(rng.exponential(60, len(kind))).astype(np.float32)
        stays.append({
            "id": "clustered", "label": -1, "var": np.concatenate([panels[k] for k in kind]),
            "val": np.concatenate(values).astype(np.float32), "minute": np.repeat(minutes, sizes),
            "set_id": np.repeat(np.arange(len(kind)), sizes), "set_minute": minutes,
            "set_size": np.array(sizes, dtype=np.int64),
        })  # fmt: skip
    return stays


@pytest.fixture(scope="module")
def learned() -> tuple[SeqSetVAE, list[float]]:
    """A model after 300 steps on the clusters, and the reconstruction loss of every step."""
    torch.manual_seed(0)
    config = ModelConfig(reduced_dim=16, latent_dim=32, inducing_points=4, feedforward_dim=32, transformer_layers=1)
    common = torch.randn(32)
    model = SeqSetVAE(config, common + torch.randn(VARIABLES, 32)).train()  # texts have much in common
    objective = SeqSetObjective(loss=LossConfig(beta=0.01, recon_decay=0, recon_floor=1.0), mode="pretrain")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stays = clustered_stays(160, seed=1)
    losses = []
    for step in range(300):
        objective.stays_seen = step * 16
        batch = batch_of(stays, [(16 * step + k) % len(stays) for k in range(16)])
        with noise_for(batch, seed=0, epoch=step):
            sums = objective.sums(model, batch)
            divide_once(sums, objective.counts(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(sums["reconstruction"].detach()) / 16)
    return model, losses


def test_reconstruction_falls_by_half_and_more(learned):
    _, losses = learned
    assert np.mean(losses[-20:]) <= 0.5 * np.mean(losses[:20])


def test_units_stay_active_and_variables_stay_apart(learned):
    model, _ = learned
    signals = probe_signals(model, batch_of(clustered_stays(80, seed=2), list(range(80))), DetectorConfig())
    assert sum(signals.active) >= 4
    assert signals.gap is not None
    assert signals.gap > 0.1
    directions = model.events.directions().detach()
    cosines = (directions @ directions.T).abs()[~torch.eye(VARIABLES, dtype=torch.bool)]
    assert float(cosines.mean()) < 0.95


def test_decoded_events_are_of_the_right_variables(learned):
    """Every real event's nearest decoded one must point to the same variable."""
    model, _ = learned
    seen = look_at(model, batch_of(clustered_stays(40, seed=3), list(range(40))), decode=True)
    decoded, layout = seen.outputs.decoded, seen.inputs.layout
    directions = model.events.directions().detach()
    right = []
    for k in range(layout.num_sets):
        mine = layout.owner == k
        near = torch.cdist(seen.outputs.target[mine], decoded[mine]).argmin(1)
        named = (decoded[mine][near] @ directions.T).abs().argmax(1)
        right += (named == seen.inputs.var[mine]).tolist()
    assert np.mean(right) >= 0.6


def planted_run(folder, *, shuffled: bool) -> dict[str, Any]:
    """Train on the generator with a risk in it, or with labels dealt at random; figures of the test stays."""
    config = settings_type(SEQSET_VAE)(
        model=ModelConfig(embedding_dim=32, reduced_dim=16, latent_dim=32, inducing_points=4, feedforward_dim=64),
        loss=LossConfig(beta=0.01, beta_warmup=1000, class_warmup=0, recon_decay=2000, free_bits=0.02),
        # By chance alone the figure of few stays would leave the limits: most of the control is for testing.
        generator=GeneratorConfig(stays=3000 if shuffled else 1500, shuffled=shuffled, median_hours=24.0),
        test_share=0.75 if shuffled else 0.2,
        train=SEQSET_VAE.train_type(
            epochs=4, learning_rate=3e-3, cells=8192, schedule="cosine", warmup_steps=20, patience=None
        ),
    )
    train_system(SEQSET_VAE, config, Start(out=folder))
    trained = open_trained(folder)
    out = folder / "evaluation"
    out.mkdir()
    found = SEQSET_VAE.evaluate(trained.config, trained.model, prepare(config).test, out)
    return dict(found)


def test_a_planted_risk_is_found(tmp_path):
    found = planted_run(tmp_path / "run", shuffled=False)
    assert found["auroc"] >= 0.80
    assert found["auprc"] >= 2.5 * found["prevalence"]


def test_labels_dealt_at_random_are_not_learned(tmp_path):
    assert 0.45 <= planted_run(tmp_path / "run", shuffled=True)["auroc"] <= 0.55
