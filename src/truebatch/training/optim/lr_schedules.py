"""Learning rates as closed forms of the step: nothing to save, nothing to replay after a restart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from truebatch.errors import ConfigError

Shape = Literal["constant", "linear", "cosine", "cosine_restarts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate of every step, as a factor of the largest one."""

    shape: Shape = "constant"
    """What follows the warm-up: no change, a line or a cosine down to `floor`, or several cosines."""
    warmup_steps: int = 0
    """Steps of a straight rise; step 0 already has the first part of it."""
    floor: float = 0.0
    """The factor of the last step."""
    restarts: int = 1
    """How many cosines `cosine_restarts` has; the first ones are a step longer where the steps do not divide evenly."""

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise ConfigError("unknown schedule", seen=f"shape={self.shape!r}", do=f"use one of {get_args(Shape)}")
        if self.warmup_steps < 0 or self.restarts < 1 or not 0 <= self.floor <= 1:
            raise ConfigError(
                "a schedule has no negative parts",
                seen=f"warmup_steps={self.warmup_steps}, restarts={self.restarts}, floor={self.floor}",
                do="give warmup_steps >= 0, restarts >= 1 and a floor from 0 to 1",
            )

    def factor(self, step: int, num_steps: int) -> float:
        """The factor of `step` (from 0) in a run of `num_steps`; the last step has exactly the floor."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.shape == "constant":
            return 1.0
        rest = max(num_steps - self.warmup_steps, 1)
        done, length = _within(step - self.warmup_steps, rest, self.restarts if self.shape == "cosine_restarts" else 1)
        progress = min(done / max(length - 1, 1), 1.0)
        down = progress if self.shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return 1.0 - (1.0 - self.floor) * down


def _within(step: int, num_steps: int, parts: int) -> tuple[int, int]:
    """The position of a step in its part, and the length of the part: `num_steps` shared out, longer parts first."""
    parts = max(min(parts, num_steps), 1)
    size, longer = divmod(num_steps, parts)
    step = min(step, num_steps - 1)
    if step < longer * (size + 1):
        return step % (size + 1), size + 1
    return (step - longer * (size + 1)) % size, size


def constant(factor: float = 1.0) -> Callable[[int, int], float]:
    """A schedule that never changes."""
    return lambda _step, _num_steps: factor
