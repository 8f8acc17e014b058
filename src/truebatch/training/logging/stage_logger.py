"""How far a training inside of other work is, as the stage that a command shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from truebatch.progress import Stage


class StageLogger:
    """Counts the steps of a run into a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def begin(self, step: int, num_steps: int) -> None:
        """The run begins after `step`."""
        self.stage.done, self.stage.total = step, num_steps

    def record(self, record: Mapping[str, Any]) -> None:
        """A step was done, or the model was validated."""
        self.stage.done = int(record["step"])
