"""What seqset_vae learns where the truth is known: events of sets of six kinds, a planted risk, and dealt-out labels.

    python -m benchmarks seqset_quality --json docs/results/seqset_vae_quality.json

Beside it, the truth table of the collapse detector. The tests marked slow hold the same figures to their limits.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.benchmark import Benchmark, Options, Row
from truebatch.batch.collate import collate
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.objective import divide_once
from truebatch.planning.rows import padded_rows
from truebatch.training.load_trained import open_trained
from truebatch.training.train_system import Start, train_system
from truebatch_systems.seqset_vae.config import (
    DetectorConfig,
    GeneratorConfig,
    LossConfig,
    ModelConfig,
    SeqSetConfig,
    SeqSetTrainConfig,
)
from truebatch_systems.seqset_vae.data.admissions import FIELDS, Stays, make_stays
from truebatch_systems.seqset_vae.data.prepare import prepare
from truebatch_systems.seqset_vae.eval.evaluate import evaluate
from truebatch_systems.seqset_vae.model.autoencoder import Posterior
from truebatch_systems.seqset_vae.model.model import SeqSetVAE
from truebatch_systems.seqset_vae.system import SEQSET_VAE
from truebatch_systems.seqset_vae.train.callbacks import probe_signals
from truebatch_systems.seqset_vae.train.collapse import Detector, measure_signals
from truebatch_systems.seqset_vae.train.loss import SeqSetObjective, look_at

CLUSTERS, VARIABLES, STEPS = 6, 20, 300
LIMIT = 10.0
"""Clamp of the log variance in the truth table."""


def clustered_stays(number: int, *, seed: int) -> Stays:
    """Stays whose sets are of one of six kinds: a panel of variables of its own, around values of its own."""
    kinds = np.random.default_rng(99)
    panels = [kinds.choice(VARIABLES, size=kinds.integers(3, 7), replace=False) for _ in range(CLUSTERS)]
    centres = [2 * kinds.standard_normal(len(panel)) for panel in panels]
    rng = np.random.default_rng(seed)
    stays = []
    for at in range(number):
        kind = rng.integers(0, CLUSTERS, rng.integers(4, 10))
        values = [centres[k] + 0.2 * rng.standard_normal(len(panels[k])) for k in kind]
        stays.append({
            "id": str(at), "label": -1, "var": np.concatenate([panels[k] for k in kind]),
            "val": np.concatenate(values), "set_minute": np.cumsum(rng.exponential(60, len(kind))),
            "set_size": [len(panels[k]) for k in kind],
        })  # fmt: skip
    return make_stays(stays)


def batch_of(stays: Stays, ids: list[int]) -> MicroBatch:
    """The stays with these numbers as one padded micro-batch."""
    numbers = np.asarray(ids, dtype=np.int64)
    return collate([stays[i] for i in ids], padded_rows(numbers, int(stays.num_events[numbers].max())), FIELDS)


def learn_clusters(steps: int = STEPS) -> tuple[SeqSetVAE, list[float]]:
    """A model after so many steps on the clusters, and the reconstruction loss of every step."""
    torch.manual_seed(0)
    config = ModelConfig(reduced_dim=16, latent_dim=32, inducing_points=4, feedforward_dim=32, transformer_layers=1)
    common = torch.randn(32)
    model = SeqSetVAE(config, common + torch.randn(VARIABLES, 32)).train()  # texts have much in common
    objective = SeqSetObjective(loss=LossConfig(beta=0.01, recon_decay=0, recon_floor=1.0), mode="pretrain")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stays = clustered_stays(160, seed=1)
    losses = []
    for step in range(steps):
        objective.stays_seen = step * 16
        batch = batch_of(stays, [(16 * step + k) % len(stays) for k in range(16)])
        with noise_for(batch, seed=0, epoch=step):
            sums = objective.sums(model, batch)
            divide_once(sums, objective.counts(batch)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(sums["reconstruction"].detach()) / 16)
    return model, losses


def judge_clusters(model: SeqSetVAE, losses: list[float]) -> dict[str, float]:
    """How far the loss fell, active units, likeness of variables, and events decoded as the right variable."""
    signals = probe_signals(model, batch_of(clustered_stays(80, seed=2), list(range(80))), DetectorConfig())
    directions = model.events.directions().detach()
    cosines = (directions @ directions.T).abs()[~torch.eye(VARIABLES, dtype=torch.bool)]
    assert signals.gap is not None
    return {
        "reconstruction_left": float(np.mean(losses[-20:]) / np.mean(losses[:20])),
        "active_units": sum(signals.active),
        "gap_with_other_latents": signals.gap,
        "largest_cosine_of_two_variables": float(cosines.max()),
        "variables_recovered": _recovered(model, directions),
    }


def _recovered(model: SeqSetVAE, directions: torch.Tensor) -> float:
    """Share of events whose nearest decoded event of their set points to the same variable."""
    seen = look_at(model, batch_of(clustered_stays(40, seed=3), list(range(40))), decode=True)
    decoded, layout = seen.outputs.decoded, seen.inputs.layout
    assert decoded is not None
    apart = torch.cdist(seen.outputs.target, decoded)
    near = apart.masked_fill(layout.owner[:, None] != layout.owner[None, :], torch.inf).argmin(1)
    named = (decoded[near] @ directions.T).abs().argmax(1)
    return float((named == seen.inputs.var).float().mean())


def learn_risk(folder: Path, *, shuffled: bool) -> dict[str, Any]:
    """Train on the generator with a risk in it, or with labels dealt at random; figures of the test stays."""
    config = SeqSetConfig(
        model=ModelConfig(embedding_dim=32, reduced_dim=16, latent_dim=32, inducing_points=4, feedforward_dim=64),
        loss=LossConfig(beta=0.01, beta_warmup=1000, class_warmup=0, recon_decay=2000, free_bits=0.02),
        # By chance alone the figure of few stays would leave the limits: most of the control is for testing.
        generator=GeneratorConfig(stays=3000 if shuffled else 1500, shuffled=shuffled, median_hours=24.0),
        test_share=0.75 if shuffled else 0.2,
        train=SeqSetTrainConfig(
            epochs=4, learning_rate=3e-3, cells=8192, schedule="cosine", warmup_steps=20, patience=None
        ),
    )
    train_system(SEQSET_VAE, config, Start(out=folder))
    trained = open_trained(folder)
    out = folder / "evaluation"
    out.mkdir()
    ready = prepare(config)
    assert ready.test is not None
    return dict(evaluate(config, ready, trained.model, ready.test, out))


def known_posterior(kind: str, *, sets: int = 600, units: int = 32) -> Posterior:
    """Posteriors of many sets, two levels, whose health is known."""
    generator = torch.Generator().manual_seed(0)
    varied = torch.randn(sets, 2, units, generator=generator)
    same = torch.randn(1, 2, units, generator=generator).expand(sets, -1, -1)
    zeros = torch.zeros(sets, 2, units)
    return {
        "prior": Posterior(zeros, zeros),
        "informative": Posterior(varied, torch.full_like(varied, 0.08).log()),
        "constant": Posterior(3 * same, torch.full_like(varied, 0.1).log()),
        "at the clamp": Posterior(varied, torch.full_like(varied, -LIMIT)),
    }[kind]


def checks(kinds: list[str], *, grace: int = 0, gap: float | None = None) -> list[dict[str, Any]]:
    """The log of a run whose posterior is this one at check after check, ten steps apart."""
    config = DetectorConfig(enter=3, leave=2)
    detector = Detector(config=config, grace_steps=grace)
    return [
        detector.check(10 * (k + 1), measure_signals(known_posterior(kind), config, logvar_limit=LIMIT, gap=gap))
        for k, kind in enumerate(kinds)
    ]


def truth_table() -> dict[str, bool]:
    """Six posteriors whose truth is known, and whether the detector says it."""
    prior, constant = checks(["prior"] * 4), checks(["constant"] * 3)
    informative, sharp = checks(["informative"] * 6), checks(["at the clamp"] * 5)
    rising, recovering = checks(["prior"] * 6, grace=60), checks(["prior"] * 3 + ["informative"] * 3)
    return {
        "the prior: collapse at the third check": [line["alarmed"] for line in prior] == [False, False, True, True],
        "sharp and informative: healthy": {(x["state"], x["too_sharp"]) for x in informative} == {("healthy", False)},
        "high KL, the same for all sets: uninformative": (constant[-1]["state"], constant[-1]["alarmed"])
        == ("uninformative", True),
        "on the clamp: too sharp, no collapse": sharp[0]["events"] == ["too sharp"]
        and not any(line["alarmed"] for line in sharp),
        "while beta rises: no alarm": not any(line["alarmed"] or line["events"] for line in rising),
        "recovery: noted after two good checks": [line["events"] for line in recovering][2:5]
        == [["alarm"], [], ["recovered"]],
    }


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "detector truth table": lambda folder: dict(truth_table()),
    "sets of six kinds": lambda folder: dict(judge_clusters(*learn_clusters())),
    "planted risk": lambda folder: learn_risk(folder / "run", shuffled=False),
    "labels dealt at random": lambda folder: learn_risk(folder / "run", shuffled=True),
}


def measure(prepared: tuple[Options, str], method: str) -> Row:
    """The figures of one part, and the CPU seconds it took."""
    _, case = prepared
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        figures = PARTS[case](Path(folder))
    return {**figures, "cpu_seconds": round(time.process_time() - began, 1)}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of every part under its name."""
    return {row["case"]: {name: row[name] for name in row if name not in ("case", "method")} for row in rows}


BENCHMARK = Benchmark(
    name="seqset_quality",
    about=f"{__doc__}\n\nMany minutes.",
    cases=lambda options: list(PARTS),
    methods=lambda options: ["seqset_vae"],
    measure=measure,
    summary=summary,
)
