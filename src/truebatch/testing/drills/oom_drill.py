"""The drill of memory: a small training runs out of it at random micro-batches, and must end as if it had not.

quiet training -> for every place of a step: run out of memory there, at random visits -> the same weights and losses
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.progress import stage
from truebatch.testing.drills.kill_drill import DrillTrial, TrialResult
from truebatch.testing.failpoints import FAILPOINTS, OUT_OF_MEMORY, armed, recorded
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.optim.param_groups import Group
from truebatch.training.trainer import train

PLACES = tuple(name for name in FAILPOINTS if name.startswith("step."))
TOLERANCE = 1e-5
"""Relative difference of weights and losses: another cut sums in another order."""
_FIELDS = (Field(name="ids"), Field(name="next", source="ids", shift=1, pad=-100))
_VOCABULARY, _SAMPLES = 20, 24


@stage("running out of memory on purpose")
def run_memory_drill(
    *, visits_each: int = 3, seed: int = 0, on_result: Callable[[TrialResult], None] = print
) -> tuple[TrialResult, ...]:
    """Run out of memory at random visits of every place of a step, on this machine's device; each result goes to `told`."""
    with recorded() as visits:
        quiet = _trained()
    draw, results = random.Random(seed), []  # noqa: S311 - places to fail at, no secret
    for name in PLACES:
        for nth in sorted(draw.sample(range(1, visits[name] + 1), min(visits_each, visits[name]))):
            results.append(run_memory_trial(DrillTrial(name, OUT_OF_MEMORY, nth), quiet))
            on_result(results[-1])
    return tuple(results)


def run_memory_trial(trial: DrillTrial, quiet: Tensor) -> TrialResult:
    """Run out of memory once and compare the end with that of the quiet training."""
    try:
        with armed(trial.spec):
            found = _trained()
    except Exception as error:  # whatever it is, it is what the drill is there to tell
        return TrialResult(trial, f"it stopped: {type(error).__name__}: {error}")
    difference = float((found - quiet).norm() / quiet.norm())
    return TrialResult(trial, "" if difference <= TOLERANCE else f"it went on, but ended {difference:.1e} away")


class _NextNumber:
    """Cross entropy of the next number, summed."""

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        return {"nll": int((batch["next"] >= 0).sum())}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        logits = model(batch["ids"]).flatten(0, 1)
        return {"nll": cross_entropy(logits, batch["next"].flatten(), ignore_index=-100, reduction="sum")}


def _trained() -> Tensor:
    """Two epochs of a small model on its device; its weights and the losses of its steps, as one vector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(_VOCABULARY, 8), nn.Tanh(), nn.Linear(8, _VOCABULARY))
    samples = _samples()
    config = TrainConfig(epochs=2, samples_per_step=8, cells=96, validate_every=2)
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))]
    data = TrainData(samples=samples, fields=_FIELDS, validation=samples[:4])
    result = train(model, _NextNumber(), data, config, groups=groups)
    result.raise_if_interrupted()
    losses = torch.tensor([float(record["loss"]) for record in result.records])
    return torch.cat([*(p.detach().cpu().flatten() for p in model.parameters()), losses]).double()


def _samples() -> Sequence[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [{"ids": draw.integers(0, _VOCABULARY, n)} for n in draw.integers(2, 30, _SAMPLES)]
