"""Whoever looks on while a run goes: the terminal, trackers. They are told, and cannot change anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Watch(Protocol):
    """Told by rank 0 alone."""

    def begin(self, step: int, num_steps: int) -> None:
        """The run begins after `step`, and will have `num_steps` in all."""
        ...

    def record(self, record: Mapping[str, Any]) -> None:
        """A step was done, or the model was validated: what `metrics.jsonl` gets, the step among it."""
        ...
