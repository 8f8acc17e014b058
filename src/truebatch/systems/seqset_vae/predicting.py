"""A trained model on many stays: probabilities and latents, in the order of the stays, however they were batched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from truebatch.planning.plan import build_plan
from truebatch.planning.settings import PlanConfig
from truebatch.systems.seqset_vae.model import SeqSetVAE
from truebatch.systems.seqset_vae.objective import Forward, look_at
from truebatch.systems.seqset_vae.stays import FIELDS, Stays, measure_stays
from truebatch.tensors.loader import load_steps
from truebatch.tensors.microbatch import MicroBatch

CELLS = {"cpu": 8192, "cuda": 131_072}
"""Most cells of a forward pass without gradients; a longer stay goes alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """What the model knows of every set, stay after stay."""

    mean: NDArray[np.float32]
    """[sets, Z] the deepest posterior mean: the set alone."""
    logvar: NDArray[np.float32]
    state: NDArray[np.float32]
    """[sets, Z] the set with all that came before it."""


def predict_logits(model: nn.Module, stays: Stays, *, cells: int | None = None) -> NDArray[np.float64]:
    """[N, C] in the order of the stays; deterministic, and the same for any `cells`."""
    found: NDArray[np.float64] | None = None
    for batch, seen in _forwards(model, stays, cells):
        logits = seen.outputs.logits.double().cpu().numpy()
        if found is None:
            found = np.zeros((len(stays), logits.shape[1]))
        found[list(batch.sample_ids)] = logits
    assert found is not None
    return found


def predict(model: nn.Module, stays: Stays, *, cells: int | None = None) -> NDArray[np.float64]:
    """[N, C] the probability of every class."""
    logits = predict_logits(model, stays, cells=cells)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return found


def find_latents(model: nn.Module, stays: Stays, *, cells: int | None = None) -> Latents:
    """The latents of every set of every stay."""
    parts: dict[str, list[Any]] = {name: [None] * len(stays) for name in ("mean", "logvar", "state")}
    for batch, seen in _forwards(model, stays, cells):
        back, lengths = seen.inputs.layout.back, list(seen.inputs.rows.lengths)
        outputs = seen.outputs
        of_sets = {
            "mean": outputs.posterior.mean[:, -1][back],
            "logvar": outputs.posterior.logvar[:, -1][back],
            "state": outputs.states,
        }
        for name, values in of_sets.items():
            for sample_id, part in zip(batch.sample_ids, torch.split(values.float().cpu(), lengths), strict=True):
                parts[name][sample_id] = part.numpy()
    return Latents(**{name: np.concatenate(column) for name, column in parts.items()})


def _forwards(model: nn.Module, stays: Stays, cells: int | None) -> Iterator[tuple[MicroBatch, Forward]]:
    assert isinstance(model, SeqSetVAE)
    device = next(model.parameters()).device
    measured = measure_stays(stays)
    most = max(cells or CELLS.get(device.type, CELLS["cpu"]), int(measured.lengths.max()))
    plan = build_plan(measured.lengths, PlanConfig(cells=most, samples_per_step=len(stays)))
    for step in load_steps(plan, stays, FIELDS):
        for batch in step:
            with torch.no_grad():
                yield batch, look_at(model, batch.to(device))
