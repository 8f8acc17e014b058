"""Callbacks: the one clock of all schedules, and the discriminator that is initialised anew now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from truebatch.planning.keyed_rng import keyed_hash
from truebatch.training.callbacks import CallbackAction
from truebatch_systems.vlm_pruning.model.model import PrunedVLM
from truebatch_systems.vlm_pruning.train.objective import PruningObjective
from truebatch_systems.vlm_pruning.train.schedules import progress_of


class Clock:
    """Tells the objective how much of the run is done: a number of the step alone, so that no cut changes it."""

    name = "schedules"

    def __init__(self, objective: PruningObjective, num_steps: int) -> None:
        self.objective, self.num_steps = objective, num_steps

    def before_step(self, step: int) -> None:
        """Set the share of the run that is done."""
        self.objective.progress = progress_of(step, self.num_steps)

    def after_step(self, step: int) -> CallbackAction:
        """Nothing to wish for."""
        return CallbackAction()

    def ended(self, step: int) -> None:
        """Nothing is left to do."""

    def state(self) -> Mapping[str, Any]:
        """The progress, for whoever reads a checkpoint."""
        return {"progress": self.objective.progress}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The next step sets it anyway."""
        self.objective.progress = float(state.get("progress", 0.0))


class FreshJudge:
    """Before some steps, drawn from seed and step alone, the discriminator and its optimiser begin anew."""

    name = "discriminator"

    def __init__(self, model: PrunedVLM, optimiser: torch.optim.Optimizer, *, chance: float, seed: int) -> None:
        self.model, self.optimiser, self.chance, self.seed = model, optimiser, chance, seed

    def before_step(self, step: int) -> None:
        """Begin anew if this step was drawn: weights from the seed, moments cleared with them."""
        drawn = keyed_hash(self.seed, 0, "vlm_pruning/fresh judge", np.array([step], dtype=np.int64)).view(np.uint64)
        if float(drawn[0]) / 2.0**64 < self.chance:
            begin_anew(self.model, self.optimiser, seed=int(drawn[0] >> np.uint64(1)))

    def after_step(self, step: int) -> CallbackAction:
        """Nothing to wish for."""
        return CallbackAction()

    def ended(self, step: int) -> None:
        """Nothing is left to do."""

    def state(self) -> Mapping[str, Any]:
        """Nothing: steps are drawn from the seed."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def begin_anew(model: PrunedVLM, optimiser: torch.optim.Optimizer, *, seed: int) -> None:
    """New weights for the discriminator; what its optimiser remembers of the old ones is forgotten."""
    assert model.discriminator is not None
    model.discriminator.begin_anew(seed)
    optimiser.state.clear()
