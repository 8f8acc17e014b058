"""The loss of seqset_vae as sums and counts: reconstruction, KL and class, with weights that follow the stays seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from truebatch.systems.seqset_vae.inputs import Noise, StayInputs, draw_noise, read_stays
from truebatch.systems.seqset_vae.losses import class_loss, kl_of_sets, reconstruction
from truebatch.systems.seqset_vae.model import Outputs, SeqSetVAE
from truebatch.systems.seqset_vae.settings import LossConfig, Mode
from truebatch.systems.seqset_vae.stays import SETS
from truebatch.tensors.microbatch import MicroBatch

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
