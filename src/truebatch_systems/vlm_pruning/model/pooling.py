"""Text states of a sample as one vector a layer: later tokens count more and are blurred less, pads do not exist."""

from __future__ import annotations

import torch
from torch import Tensor

from truebatch.batch.keyed_random import keyed_normal
from truebatch.batch.microbatch import SAMPLES
from truebatch_systems.vlm_pruning.config import MethodSettings
from truebatch_systems.vlm_pruning.data.encode import TEXT
from truebatch_systems.vlm_pruning.model.token_index import Places


def pool_text(states: dict[int, Tensor], places: Places, method: MethodSettings, *, blurs: bool) -> list[Tensor]:
    """[B, T, d] of some layers -> [N, d] each, in fp32; ramps run over each sample's own text.

    With `blurs` noise is added, which belongs to the sample and the layer: unpruned and pruned states get the same.
    """
    return [
        _pool(states[index], places, method, f"vlm_pruning/pool/{index}" if blurs else "") for index in sorted(states)
    ]


def _pool(states: Tensor, places: Places, method: MethodSettings, purpose: str) -> Tensor:
    tokens = places.take_flat(states).float()  # [n, d]
    ramp = _ramp(places)
    if purpose:
        scale = _between(method.disc_noise_scale_start, method.disc_noise_scale_end, ramp)
        noise = places.axis.take_tokens(keyed_normal((states.shape[-1],), purpose, axis=TEXT))
        tokens = tokens + scale[:, None] * noise
    weight = _between(method.disc_pool_start_weight, method.disc_pool_end_weight, ramp)
    pooled = places.sums_flat(weight[:, None] * tokens) / places.sums_flat(weight)[:, None].clamp(min=1e-12)
    if purpose and method.disc_noise_scale:
        pooled = pooled + method.disc_noise_scale * keyed_normal((states.shape[-1],), purpose + "/after", axis=SAMPLES)
    return pooled


def _ramp(places: Places) -> Tensor:
    """[n] from 0 at the first text token of a sample to 1 at its last."""
    at = places.axis.take_tokens(places.axis.positions)
    return at / (places.lengths[places.owner] - 1).clamp(min=1)


def _between(start: float, end: float, ramp: Tensor) -> Tensor:
    return torch.as_tensor(start + (end - start) * ramp, dtype=torch.float32)
