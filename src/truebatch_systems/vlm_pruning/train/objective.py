"""The losses of vlm_pruning as sums over samples: task, budget, count, binarisation, and what the teacher says.

Every value belongs to one sample; means are over its own tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch
from truebatch_systems.vlm_pruning.config import MethodSettings
from truebatch_systems.vlm_pruning.model.decoder_layers import Stream, word_logits
from truebatch_systems.vlm_pruning.model.masks import average_share, keep_of, target_share
from truebatch_systems.vlm_pruning.model.model import Choosing, Pass, PrunedVLM
from truebatch_systems.vlm_pruning.model.pooling import pool_text
from truebatch_systems.vlm_pruning.model.token_index import Places
from truebatch_systems.vlm_pruning.train.schedules import Moment, moment_at

TASK, BUDGET, COUNT, BINARISATION = "task", "budget", "token_count", "binarization"
ADVERSARIAL, DISCRIMINATOR, DISTILLATION = "adversarial", "discriminator", "distillation"


@dataclass(kw_only=True, slots=True, eq=False)
class PruningObjective:
    """The terms of a method. `progress` is set from outside before every step: the one clock of all schedules."""

    method: MethodSettings
    progress: float = 0.0

    @property
    def terms(self) -> tuple[str, ...]:
        """The loss terms of this method."""
        if self.method.stage == "backbone":
            return (TASK,)
        taught = {"adversarial": (ADVERSARIAL, DISCRIMINATOR), "distillation": (DISTILLATION,), "none": ()}
        count = (COUNT,) if self.method.token_count_loss_weight else ()
        binary = (BINARISATION,) if self.method.binarization_loss_weight else ()
        return (TASK, BUDGET, *count, *binary, *taught[self.method.teacher])

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Every term is divided by the number of samples."""
        return dict.fromkeys(self.terms, batch.num_samples)

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """Every term, weighted as scheduled, summed over the samples of a micro-batch.

        Outside training weights are those of the end, masks are 0 or 1, and the two sides of the game count nothing.
        """
        assert isinstance(model, PrunedVLM)
        moment = moment_at(self.method, self.progress if model.training else 1.0)
        weights = self.weights(moment, is_training=model.training)
        found = sample_terms(model, batch, temperature=moment.temperature, terms=self.terms)
        return {name: weights[name] * found[name].sum() for name in self.terms}

    def weights(self, moment: Moment, *, is_training: bool) -> dict[str, float]:
        """What every term counts for at a moment."""
        if self.method.stage == "backbone":
            return {TASK: 1.0}
        return {
            TASK: moment.task,
            BUDGET: 1.0 if self.method.budget_of == "average" else moment.budget,  # a price weighs by itself
            COUNT: self.method.token_count_loss_weight,
            BINARISATION: self.method.binarization_loss_weight,
            ADVERSARIAL: moment.adversarial if is_training else 0.0,
            DISCRIMINATOR: 1.0 if is_training else 0.0,
            DISTILLATION: self.method.distillation_weight,
        }


def sample_terms(
    model: PrunedVLM, batch: MicroBatch, *, temperature: float, terms: tuple[str, ...]
) -> dict[str, Tensor]:
    """[N] of every term, unweighted."""
    return watched_terms(model, batch, temperature=temperature, terms=terms)[0]


def watched_terms(
    model: PrunedVLM, batch: MicroBatch, *, temperature: float, terms: tuple[str, ...]
) -> tuple[dict[str, Tensor], Pass, Stream]:
    """The terms, and the pass they come from. One look at the images, the first layers once, then what is needed."""
    stream = model.look(batch)
    if model.method.stage == "backbone":
        whole = model.unpruned(stream)
        return {TASK: answer_loss(model, stream, whole, batch)}, whole, stream
    is_judged = ADVERSARIAL in terms
    wanted = model.wanted_states if is_judged else ()
    prefix = model.prefix(stream, wanted=wanted)
    how = Choosing(how="train" if model.training else "hard", temperature=temperature)
    pruned = model.pruned(stream, how, wanted=wanted, start=prefix)
    found = {TASK: answer_loss(model, stream, pruned, batch), **mask_terms(model, stream.vision, pruned)}
    if is_judged or DISTILLATION in terms:
        with torch.no_grad():
            whole = model.unpruned(stream, wanted=wanted, start=prefix)
        if is_judged:
            found |= judged_terms(model, stream, whole, pruned)
        else:
            found[DISTILLATION] = distillation_loss(model, stream, whole, pruned)
    return found, pruned, stream


def answer_loss(model: PrunedVLM, stream: Stream, found: Pass, batch: MicroBatch) -> Tensor:
    """[N]: mean negative log likelihood of each sample's answer tokens."""
    logits = answer_logits(model, stream, found)
    targets = stream.answer.take_flat(batch["input_ids"])
    each = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return stream.answer.sums_flat(each) / stream.answer.lengths.clamp(min=1)


def answer_logits(model: PrunedVLM, stream: Stream, found: Pass) -> Tensor:
    """[n, vocabulary]: what is said where each answer token should follow."""
    before = found.final.flatten(0, 1).index_select(0, stream.answer.token_cells - 1)
    return word_logits(model.backbone, before)


def mask_terms(model: PrunedVLM, places: Places, found: Pass) -> dict[str, Tensor]:
    """[N] each: budget, count and binarisation from keep probabilities; outside training from the masks that acted."""
    method, masks = model.method, found.soft if model.training else found.used
    share = average_share(masks, places, layers=method.pruning_layers, num_layers=model.num_layers)
    has_vision = (places.lengths > 0).float()
    over = (share - target_share(method, places.lengths)) * has_vision
    return {
        BUDGET: _strayed(method, over) if model.log_price is None else _paid(model, places, found, over),
        COUNT: share * has_vision,
        BINARISATION: torch.stack([_undecided(mask, places) for mask in masks]).mean(0),
    }


def _strayed(method: MethodSettings, over: Tensor) -> Tensor:
    """[N]: how far each sample is from the budget, squared."""
    return torch.relu(over) ** 2 if method.sparsity_loss_only_on_excess else over**2


def _paid(model: PrunedVLM, places: Places, found: Pass, over: Tensor) -> Tensor:
    """[N]: what each sample pays beyond the budget. Heads learn to pay less; the price rises with what is kept in use.

    Noise keeps some tokens in training that nobody would keep in use; the price follows what is kept without it. Its
    own gradient is a sum over samples as any other, so that no cut of a step changes the price.
    """
    assert model.log_price is not None
    price = model.log_price.exp().detach()
    layers, target = model.method.pruning_layers, target_share(model.method, places.lengths)
    used = average_share(used_masks(model, places, found), places, layers=layers, num_layers=model.num_layers)
    excess = (used / target - 1) * (places.lengths > 0)
    return price * over - (model.log_price - model.log_price.detach()) * excess


@torch.no_grad()
def used_masks(model: PrunedVLM, places: Places, found: Pass) -> list[Tensor]:
    """[B, V] a pruning layer: the log masks that the logits of a pass would give in use, without noise."""
    so_far = torch.zeros_like(found.logits[0])
    masks: list[Tensor] = []
    for stage, logits in enumerate(found.logits):
        masks.append(model.choose(stage, logits, so_far, places, Choosing(how="hard"))[1])
        so_far = so_far + masks[-1]
    return masks


def _undecided(log_mask: Tensor, places: Places) -> Tensor:
    """[N]: large for masks near one half, small for masks near 0 and 1 that are spread."""
    keep = keep_of(log_mask)
    mean = places.means(keep)
    variance = places.means(keep**2) - mean**2
    return places.means(keep * (1 - keep)) - 0.5 * variance


def judged_terms(model: PrunedVLM, stream: Stream, whole: Pass, pruned: Pass) -> dict[str, Tensor]:
    """[N] each: how far the pruners are from passing as unpruned, and the discriminator's own loss."""
    judge = model.discriminator
    assert judge is not None
    real = pool_text(whole.states, stream.text, model.method, blurs=model.training)
    fake = pool_text(pruned.states, stream.text, model.method, blurs=model.training)
    of_real, of_fake = judge(real), judge([one.detach() for one in fake])
    return {
        ADVERSARIAL: _surprise(judge(fake), is_unpruned=True),
        DISCRIMINATOR: _surprise(of_real, is_unpruned=True) + _surprise(of_fake, is_unpruned=False),
    }


def _surprise(logits: Tensor, *, is_unpruned: bool) -> Tensor:
    target = torch.full_like(logits, float(is_unpruned))
    return nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")


def distillation_loss(model: PrunedVLM, stream: Stream, whole: Pass, pruned: Pass) -> Tensor:
    """[N]: mean KL divergence of the pruned answer's distribution from the unpruned one."""
    heat = model.method.distillation_temperature
    with torch.no_grad():
        wanted = (answer_logits(model, stream, whole).float() / heat).log_softmax(-1)
    said = (answer_logits(model, stream, pruned).float() / heat).log_softmax(-1)
    each = (wanted.exp() * (wanted - said)).sum(-1) * heat**2
    return stream.answer.sums_flat(each) / stream.answer.lengths.clamp(min=1)
