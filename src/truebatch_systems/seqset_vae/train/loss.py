"""What a set and a stay cost: decoded events against real ones, latents against the prior, logits against the class.

All results are one number a set [M] or a stay [N], in fp32; nothing is averaged over a micro-batch here.

The loss of seqset_vae as sums and counts: reconstruction, KL and class, with weights that follow the stays seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from truebatch.batch.microbatch import MicroBatch
from truebatch_systems.seqset_vae.config import LossConfig, Mode
from truebatch_systems.seqset_vae.data.admissions import SETS
from truebatch_systems.seqset_vae.model.autoencoder import Posterior
from truebatch_systems.seqset_vae.model.model import Noise, Outputs, SeqSetVAE, StayInputs, draw_noise, read_stays
from truebatch_systems.seqset_vae.model.set_attention import Bucket, SetLayout

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


RECONSTRUCTION, KL, CLASS = "reconstruction", "kl", "class"


@dataclass(frozen=True, slots=True)
class Weights:
    """What each term counts for at one moment."""

    reconstruction: float
    kl: float
    classify: float


def weights_at(config: LossConfig, stays_seen: int | None) -> Weights:
    """The weights after so many stays; None for evaluation, where they are those of the end."""
    if stays_seen is None:
        return Weights(config.recon_weight * config.recon_floor, config.beta, config.class_weight)
    falling = max(config.recon_floor, 1 - stays_seen / config.recon_decay) if config.recon_decay else config.recon_floor
    return Weights(
        reconstruction=config.recon_weight * falling,
        kl=config.beta * _ramp(stays_seen, config.beta_warmup),
        classify=config.class_weight * _ramp(stays_seen, config.class_warmup),
    )


def _ramp(seen: int, over: int) -> float:
    return min(1.0, seen / over) if over else 1.0


@dataclass(kw_only=True, slots=True, eq=False)
class SeqSetObjective:
    """The terms of a mode. A term is a sum over stays (or over sets, with reduction `set`) and its count.

    `stays_seen`, `beta_factor` and `free_bits_factor` are set from outside between steps: by the schedule, and by the
    collapse detector when it anneals. Both are saved with the run.
    """

    loss: LossConfig
    mode: Mode = "joint"
    class_weights: tuple[float, ...] = ()
    """Of the classes, over the whole training set; for classify=weighted."""
    stays_seen: int = 0
    beta_factor: float = 1.0
    free_bits_factor: float = 1.0

    @property
    def terms(self) -> tuple[str, ...]:
        """The loss terms of this mode."""
        return {
            "joint": (RECONSTRUCTION, KL, CLASS),
            "pretrain": (RECONSTRUCTION, KL),
            "finetune": (CLASS,),
        }[self.mode]

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Stays (or sets) for reconstruction and KL, labelled stays for the class."""
        number = sum(batch.rows(SETS).lengths) if self.loss.reduction == "set" else batch.num_samples
        found = {RECONSTRUCTION: number, KL: number}
        if CLASS in self.terms:
            found[CLASS] = int((batch["label"] >= 0).sum())
        return {name: found[name] for name in self.terms}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """Every term summed over the stays of a micro-batch; noise and schedules only in training."""
        return self.sums_of(*self._run(model, batch), batch["label"], is_training=model.training)

    def outputs_and_sums(
        self, model: nn.Module, batch: MicroBatch
    ) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """Logits and states of every stay, and the terms, from one forward pass: for `verify`."""
        outputs, inputs = self._run(model, batch)
        sums = self.sums_of(outputs, inputs, batch["label"], is_training=model.training)
        states = torch.split(outputs.states, list(inputs.rows.lengths))
        return {"logits": list(outputs.logits), "states": list(states)}, sums

    def _run(self, model: nn.Module, batch: MicroBatch) -> tuple[Outputs, StayInputs]:
        assert isinstance(model, SeqSetVAE)
        inputs = read_stays(batch)
        noise = draw_noise(batch, inputs, model.settings) if model.training else None
        if noise is not None and self.mode == "finetune":
            noise = replace(noise, posterior=None)  # Latents are given here and not learned.
        return model(inputs, noise, decode=RECONSTRUCTION in self.terms), inputs

    def sums_of(self, outputs: Outputs, inputs: StayInputs, labels: Tensor, *, is_training: bool) -> dict[str, Tensor]:
        """The terms of a forward pass that has been made."""
        weights = weights_at(self.loss, self.stays_seen if is_training else None)
        beta = weights.kl * (self.beta_factor if is_training else 1.0)
        found: dict[str, Tensor] = {}
        if outputs.decoded is not None:
            recon = reconstruction(outputs.decoded, outputs.target, inputs.layout)
            found[RECONSTRUCTION] = weights.reconstruction * self._over_stays(recon, inputs)
            floor = self.loss.free_bits * (self.free_bits_factor if is_training else 1.0)
            found[KL] = beta * self._over_stays(kl_of_sets(outputs.posterior, floor), inputs)
        if CLASS in self.terms:
            each = class_loss(outputs.logits, labels, self.loss, self.class_weights)
            found[CLASS] = weights.classify * each.sum()
        return found

    def _over_stays(self, of_sets: Tensor, inputs: StayInputs) -> Tensor:
        """The sum of all sets, or of the means of the stays."""
        if self.loss.reduction == "set":
            return of_sets.sum()
        return stay_means(of_sets, inputs).sum()


def stay_means(of_sets: Tensor, inputs: StayInputs) -> Tensor:
    """[M] in the order of the layout -> [N]: the mean over the sets of every stay."""
    in_order = of_sets.index_select(0, inputs.layout.back)
    cells = in_order.new_zeros(inputs.is_real.numel()).index_copy(0, inputs.cell_of_set, in_order)
    return cells.view(inputs.is_real.shape).sum(1) / inputs.is_real.sum(1)


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """A forward pass with what it was made from: for evaluation, export and the detector."""

    inputs: StayInputs
    outputs: Outputs


@torch.no_grad()
def look_at(model: SeqSetVAE, batch: MicroBatch, *, decode: bool = False, noise: Noise | None = None) -> Forward:
    """A forward pass in eval mode, whatever mode the model is in; that mode is left as it was."""
    was_training = model.training
    model.eval()
    try:
        inputs = read_stays(batch)
        return Forward(inputs, model(inputs, noise, decode=decode))
    finally:
        model.train(was_training)
