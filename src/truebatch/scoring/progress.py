"""How far a run is: in samples and in tokens, with the time left from planned cost.

Batches come longest first, so that counting samples alone would promise too much time at the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

from truebatch.scoring.store.outcome import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands."""

    samples: int
    """Different ones; those of equal content count once."""
    done: int
    failed: int
    tokens: int
    """Planned for all of them."""
    tokens_done: int
    seconds: float = 0.0
    """Since this process began to judge."""
    seconds_left: float | None = None
    """From the planned cost of what is left; None before the first batch."""

    def line(self) -> str:
        """One line for a terminal."""
        left = "" if self.seconds_left is None else f", {_clock(self.seconds_left)} left"
        bad = f"; {self.failed:,} failed" if self.failed else ""
        share = 100 * self.tokens_done / max(1, self.tokens)
        return f"{self.done:,}/{self.samples:,} samples, {share:.1f}% of {self.tokens:,} tokens{left}{bad}"


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class ProgressTracker:
    """Counts what is committed; several workers may report."""

    progress: Progress
    tokens_of: Mapping[str, int]
    on_progress: OnProgress | None = None
    clock: Callable[[], float] = time.monotonic
    _began: float | None = None
    _tokens_before: int = 0
    _lock: Lock = field(default_factory=Lock)

    def begin(self) -> None:
        """Judging begins; what was done before does not count for speed."""
        self._began, self._tokens_before = self.clock(), self.progress.tokens_done
        self._tell()

    def committed(self, outcomes: list[Outcome]) -> None:
        """A batch is on the disk."""
        with self._lock:
            now = self.progress
            tokens = now.tokens_done + sum(self.tokens_of.get(outcome.key, 0) for outcome in outcomes)
            bad = sum(outcome.status == "failed" for outcome in outcomes)
            seconds = self.clock() - (self._began if self._began is not None else self.clock())
            fresh = tokens - self._tokens_before
            left = seconds * (now.tokens - tokens) / fresh if fresh > 0 else None
            self.progress = replace(
                now, done=now.done + len(outcomes), failed=now.failed + bad, tokens_done=tokens, seconds=seconds,
                seconds_left=left,
            )  # fmt: skip
            self._tell()

    def _tell(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self.progress)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
