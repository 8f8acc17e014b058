"""The optimisers of a pruning run: pruners, merger and discriminator, each with the terms it follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from truebatch.training.config import TrainConfig
from truebatch.training.optim.param_groups import Group
from truebatch_systems.vlm_pruning.model.model import PrunedVLM
from truebatch_systems.vlm_pruning.train.objective import (
    ADVERSARIAL,
    BUDGET,
    DISCRIMINATOR,
    DISTILLATION,
    TASK,
    PruningObjective,
)

_LARGEST_MISS = 0.25
"""Relative to the budget, what moves the price: all tokens kept at the start miss it by far more than none kept can, and
the price would run away upwards."""


def pruning_groups(model: PrunedVLM, train: TrainConfig) -> Sequence[Group]:
    """An optimiser each for pruners, merger and discriminator; all gradients are taken before any of them updates."""
    terms = PruningObjective(method=model.method).terms
    parts: dict[str, tuple[nn.Module | None, float, tuple[str, ...]]] = {
        "layer_pruners": (model.pruners, train.learning_rate, tuple(t for t in terms if t != DISCRIMINATOR)),
        "token_merger": (
            model.merger,
            model.method.merger_learning_rate,
            tuple(t for t in terms if t in (TASK, ADVERSARIAL, DISTILLATION)),
        ),
        "discriminator": (model.discriminator, model.method.disc_learning_rate, (DISCRIMINATOR,)),
    }
    groups = {
        name: Group(
            name=name,
            optimiser=_optimiser(part, rate, train),
            terms=follows,
            max_grad_norm=train.max_grad_norm,
            schedule=train.lr_schedule(),
        )
        for name, (part, rate, follows) in parts.items()
        if part is not None
    }
    if "discriminator" in groups:
        model.judges_optimiser = groups["discriminator"].optimiser
    return [*groups.values(), *_price_group(model)]


def _price_group(model: PrunedVLM) -> list[Group]:
    """The price of a token climbs by plain steps, as far as the budget is missed, up to a limit."""
    if model.log_price is None:
        return []
    climbs = torch.optim.SGD([model.log_price], lr=model.method.price_learning_rate)
    # No schedule: while the heads still learn, what they keep at a price moves, and the price has to follow.
    return [Group(name="price", optimiser=climbs, terms=(BUDGET,), max_grad_norm=_LARGEST_MISS)]


def _optimiser(part: nn.Module, rate: float, train: TrainConfig) -> torch.optim.Optimizer:
    learned = [p for p in part.parameters() if p.requires_grad]
    return torch.optim.AdamW(learned, lr=rate, weight_decay=train.weight_decay)
