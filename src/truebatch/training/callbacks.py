"""Callbacks and loggers of a run.

Callbacks run on every rank, may change what the objective reads, may stop training, and are checkpointed. Loggers (the
terminal, trackers) run on rank 0, read the records of a run and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class CallbackAction:
    """What a callback asks for after a step."""

    keep: bool = False
    """Save a checkpoint of this step, and do not prune it until another one is asked for."""
    stop: str = ""
    """Why the run must end here, as a check that failed (exit code 1); empty to go on."""
    say: str = ""
    """A line to print; empty for none."""


class Callback(Protocol):
    """Called on every rank with the same arguments; the actions that rank 0 gets count."""

    @property
    def name(self) -> str:
        """Under which its state is saved."""
        ...

    def before_step(self, step: int) -> None:
        """`step` steps have been done, another begins."""
        ...

    def after_step(self, step: int) -> CallbackAction:
        """`step` steps have been done; the model is as after the update."""
        ...

    def ended(self, step: int) -> None:
        """The run has ended after `step`: done, stopped by a check or asked to stop; not by an error."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Plain data for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; from the beginning if it is empty."""
        ...


@runtime_checkable
class EndCheck(Protocol):
    """A callback that also judges the end of a run; one that has no such method is asked as after any other step."""

    def at_end(self, step: int) -> CallbackAction:
        """`step` was the last step: asked in place of `after_step`, on every rank, before the last checkpoint is saved.

        `stop` makes the run end as a check that failed (exit code 1). A run that is interrupted has not ended.
        """
        ...


def join_actions(actions: Iterable[CallbackAction]) -> CallbackAction:
    """All actions as one: kept if any callback asks for it, stopped with every reason there is."""
    found = list(actions)
    reasons, lines = (("; ".join(filter(None, words))) for words in ((a.stop for a in found), (a.say for a in found)))
    return CallbackAction(any(a.keep for a in found), reasons, lines)


class Logger(Protocol):
    """Called on rank 0 alone."""

    def begin(self, step: int, num_steps: int) -> None:
        """The run begins after `step`, and will have `num_steps` in all."""
        ...

    def record(self, record: Mapping[str, Any]) -> None:
        """A step was done, or the model was validated: what `metrics.jsonl` gets, the step among it."""
        ...
