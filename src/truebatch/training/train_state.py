"""Where a run is and how it ended, as plain data: all that a restart needs beside weights and optimisers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from truebatch.interrupts import EXIT_INTERRUPTED
from truebatch.training.checkpoint.manifest import Best


class EndReason(StrEnum):
    """Why a run ended without an error. Its words are for people; this is what the program goes by."""

    ALL_STEPS_DONE = "all_steps_done"
    NO_IMPROVEMENT = "no_improvement"
    CHECK_FAILED = "check_failed"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> int:
        """0 when done; 1 when a check stopped the run; 75 when interrupted and a second start resumes it."""
        return {EndReason.CHECK_FAILED: 1, EndReason.INTERRUPTED: EXIT_INTERRUPTED}.get(self, 0)


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
    """Steps that are skipped because their samples made the run roll back."""
    num_steps: int = 0
    """Steps the run is to have; another start may raise them. 0: not known."""
    end: EndReason | None = None
    """Why the run ended; None while it has not."""
    why: str = ""
    """The same in words."""

    @property
    def is_done(self) -> bool:
        """True once the run has ended, for whatever reason."""
        return self.end is not None

    def finish(self, end: EndReason, why: str) -> None:
        """The run ends after this step."""
        self.end, self.why = end, why

    def reopen(self) -> None:
        """The run has not ended after all: it has more steps to do."""
        self.end, self.why = None, ""

    def advance(self, step_in_epoch: int, *, steps_per_epoch: int) -> None:
        """This step of the epoch is done, and the next is the following one or the first of another epoch."""
        self.step_in_epoch = step_in_epoch + 1
        if self.step_in_epoch == steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0

    def roll_back_to(self, back: TrainState) -> None:
        """Be where an earlier checkpoint was, and pass over the step that was to come."""
        back.skipped_steps = sorted({*self.skipped_steps, self.step})
        back.rollbacks, back.num_steps = self.rollbacks + 1, self.num_steps
        back.reopen()  # It may have been the end of a run that has since got more steps.
        for one in fields(self):
            setattr(self, one.name, getattr(back, one.name))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint. An interruption is not the end of a run: another start resumes it."""
        values = asdict(self)
        is_over = self.end not in (None, EndReason.INTERRUPTED)
        return values | {"end": str(self.end) if is_over else None, "why": self.why if is_over else ""}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainState:
        """The state that a checkpoint holds."""
        values = dict(saved)
        if values.pop("is_done", False):
            values["end"] = _end_of_sentence(values["why"])
        end = values.pop("end", None)
        return cls(**values, end=None if end is None else EndReason(end))

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


def _end_of_sentence(why: str) -> EndReason:
    """Checkpoints written before there was an `end` hold only its words, which were these."""
    if why.startswith("stopped by a check"):
        return EndReason.CHECK_FAILED
    return EndReason.ALL_STEPS_DONE if why == "all steps are done" else EndReason.NO_IMPROVEMENT
