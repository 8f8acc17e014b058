"""How often a run saves by itself: at the end of an epoch, unless saving takes too much of its time.

A large model whose epochs are short would spend most of its time writing checkpoints that the next one replaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SHARE = 0.05
"""The most of a run's time that checkpoints nobody asked for may take."""
NOTICED_SECONDS = 5.0
"""Saves that are quicker than this are made at the end of every epoch, whatever their share."""


@dataclass(slots=True)
class SavePace:
    """What the last save took, and when it ended."""

    clock: Callable[[], float] = time.monotonic
    seconds: float = 0.0
    ended: float = 0.0
    is_said: bool = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a save."""
        began = self.clock()
        yield
        self.ended = self.clock()
        self.seconds = self.ended - began

    def is_worth_it(self) -> bool:
        """Whether so much time has passed since the last save that another takes no more than its share."""
        if self.seconds < NOTICED_SECONDS:
            return True
        return self.clock() - self.ended >= self.seconds / SHARE

    def once(self) -> str | None:
        """The sentence for the first epoch that ends without a save."""
        if self.is_said:
            return None
        self.is_said = True
        return (
            f"a checkpoint takes {self.seconds:,.0f} s: the end of an epoch is saved where that takes at most {SHARE:.0%} of "
            "the time (--set train.save_every=N saves every N steps)"
        )
