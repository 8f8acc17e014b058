"""What a set and a stay cost: decoded events against real ones, latents against the prior, logits against the class.

All results are one number a set [M] or a stay [N], in fp32; nothing is averaged over a micro-batch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from truebatch.systems.seqset_vae.autoencoder import Posterior
from truebatch.systems.seqset_vae.sets import Bucket, SetLayout
from truebatch.systems.seqset_vae.settings import LossConfig

_LEAST_DOUBT = 1e-12
"""Of a focal loss: the gradient of a root of nothing is infinite, and no number beside a loss of 0."""
DIRECTION, SIZE, DISTANCE = 1.0, 1.0, 3.0
"""Weights of the three parts of reconstruction."""


def reconstruction(decoded: Tensor, target: Tensor, layout: SetLayout) -> Tensor:
    """[M]: how far decoded events [n, R] are from the nearest real ones of their set, and the other way round.

    Three distances between events count: of direction (1 - cosine), of length, and squared. Each is averaged over the
    events of the set, so that a set of any size counts alike.
    """
    with torch.autocast(decoded.device.type, enabled=False):
        exact = torch.promote_types(decoded.dtype, torch.float32)
        both = torch.cat([decoded.to(exact), target.to(exact)], dim=-1)
        cells = zip(layout.in_cells(both), layout.buckets, layout.cut_sets(layout.sizes), strict=True)
        parts = [_nearest(part, bucket, sizes) for part, bucket, sizes in cells]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _nearest(both: Tensor, bucket: Bucket, sizes: Tensor) -> Tensor:
    """[sets, width, 2R] -> [sets]."""
    decoded, target = both.chunk(2, dim=-1)
    product = decoded @ target.transpose(1, 2)  # [sets, width, width]
    square, other_square = decoded.square().sum(-1)[:, :, None], target.square().sum(-1)[:, None, :]
    length, other_length = (square + 1e-12).sqrt(), (other_square + 1e-12).sqrt()
    distances = torch.stack(
        [
            DIRECTION * (1 - product / (length * other_length)),
            SIZE * (length - other_length).abs(),
            DISTANCE * (square + other_square - 2 * product).clamp_min(0),
        ]
    )
    if bucket.is_real is None:
        return 0.5 * (distances.amin(3) + distances.amin(2)).sum((0, 2)) / sizes
    real, other_real = bucket.is_real[:, :, None], bucket.is_real[:, None, :]
    far = distances.masked_fill(~(real & other_real), math.inf)
    nearest = far.amin(3) + far.amin(2)
    return 0.5 * nearest.masked_fill(~bucket.is_real, 0.0).sum((0, 2)) / sizes


def kl_per_dimension(posterior: Posterior) -> Tensor:
    """[M, L, Z] nats from the prior: raw, without floor or weight."""
    return 0.5 * (posterior.logvar.exp() + posterior.mean.square() - 1 - posterior.logvar)


def kl_of_sets(posterior: Posterior, free_bits: float | Tensor) -> Tensor:
    """[M]: nats above what is free, level l weighted by (l + 1) / L.

    Every dimension of every set has its own floor: one over a batch would couple samples, one over the sum would let a
    few dimensions pay for all.
    """
    levels = posterior.mean.shape[1]
    weights = torch.arange(1, levels + 1, device=posterior.mean.device) / levels
    floored = torch.maximum(kl_per_dimension(posterior), _like(free_bits, posterior.mean))
    return (floored.sum(-1) * weights).sum(-1)


def _like(value: float | Tensor, other: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=other.dtype, device=other.device)


def balanced_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """What each class counts for, so that all weigh alike over the whole dataset; a class nobody has weighs 1."""
    total, present = sum(counts), sum(1 for n in counts if n)
    return tuple(total / (present * n) if n else 1.0 for n in counts)


def class_loss(logits: Tensor, labels: Tensor, config: LossConfig, weights: Sequence[float]) -> Tensor:
    """[N]: the loss of every stay, 0 where it has no label (-1).

    `weights` of the classes come from the whole training set, never from a micro-batch.
    """
    is_labelled = labels >= 0
    known = labels.clamp_min(0)
    if config.classify == "focal":
        found = _focal(logits, known, config)
    else:
        found = functional.cross_entropy(logits, known, reduction="none", label_smoothing=config.label_smoothing)
    if config.classify == "weighted":
        found = found * torch.tensor(weights).to(logits, non_blocking=True).index_select(0, known)
    return torch.where(is_labelled, found, 0.0)


def _focal(logits: Tensor, labels: Tensor, config: LossConfig) -> Tensor:
    """-alpha (1 - p)^gamma log p; alpha is for the classes above 0, 1 - alpha for class 0."""
    log_p = torch.log_softmax(logits, dim=-1).gather(1, labels[:, None]).squeeze(1)
    alpha = torch.where(labels > 0, config.focal_alpha, 1 - config.focal_alpha)
    doubt = (-torch.expm1(log_p)).clamp_min(_LEAST_DOUBT)
    return -alpha * doubt.pow(config.focal_gamma) * log_p
