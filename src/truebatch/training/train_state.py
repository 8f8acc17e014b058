"""Where a run is, as plain data: all that a restart needs beside weights and optimisers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from truebatch.training.checkpoint.manifest import Best


@dataclass(slots=True)
class TrainState:
    """The position of a run after a step; changed only between steps."""

    step: int = 0
    """Steps done in all, skipped ones included."""
    epoch: int = 0
    step_in_epoch: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    validations_without_improvement: int = 0
    nonfinite_in_row: int = 0
    rollbacks: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    """Steps that are passed over because their samples made the run roll back."""
    num_steps: int = 0
    """Steps the run is to have; another start may raise them. 0: not known."""
    is_done: bool = False
    why: str = ""
    """Why the run ended."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return asdict(self)

    def best(self) -> Best | None:
        """The best validation so far, for the manifest of a checkpoint."""
        if self.best_step is None or self.best_loss is None:
            return None
        return Best(self.best_step, self.best_loss)

    def improve(self, loss: float, *, min_delta: float) -> bool:
        """Take a validation loss in; True if it is the best so far by at least `min_delta`. NaN never improves."""
        is_better = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss - min_delta)
        if is_better:
            self.best_loss, self.best_step, self.validations_without_improvement = loss, self.step, 0
        else:
            self.validations_without_improvement += 1
        return is_better
