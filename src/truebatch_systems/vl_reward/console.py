"""The log lines of the original script, written while batches are judged, whatever the judge.

A batch that fails is halved until the failing sample is found; the log uses the words of the original script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from truebatch.errors import ConfigError
from truebatch.scoring.backends.interface import Backend, Cost, SampleError, ScoreRequest, ScoreResponse

Say = Callable[[str], None]
JUDGE = "[Qwen3VLRewardModel]"


@dataclass(slots=True)
class Lines:
    """Counts judged images over all judges of a run, and logs each batch."""

    say: Say
    done: int = 0
    lock: Lock = field(default_factory=Lock)

    def processed(self, answers: Sequence[ScoreResponse | SampleError]) -> None:
        """Log a batch that was judged: `Processed batch 0-3: avg_score=7.234`, with its failures beside the mean."""
        with self.lock:
            first, self.done = self.done, self.done + len(answers)
        scores = [one.score for one in answers if isinstance(one, ScoreResponse) and one.score is not None]
        failed = len(answers) - len(scores)
        mean = f"{sum(scores) / len(scores):.3f}" if scores else "-"
        more = f" ({failed} without a score)" if failed else ""
        if len(answers) == 1:
            self.say(f"{JUDGE} Processed image {first}: score={mean}{more}")
        else:
            self.say(f"{JUDGE} Processed batch {first}-{first + len(answers) - 1}: avg_score={mean}{more}")

    def failed(self, number: int, error: Exception) -> None:
        """Log a batch that failed as a whole; its halves come next."""
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.say(f"{JUDGE} Error in batch {self.done}-{self.done + number - 1}: {words}")
        if number > 1:
            self.say(f"{JUDGE} Falling back to sequential processing for this batch...")


@dataclass(frozen=True, slots=True)
class SpokenBackend:
    """A backend whose batches are logged."""

    inner: Backend
    lines: Lines

    def describe(self) -> Mapping[str, Any]:
        """As the inner one."""
        return self.inner.describe()

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """As the inner one."""
        return self.inner.cost(sample)

    def prepare(self, sample: ScoreRequest, /) -> Any:
        """As the inner one."""
        return self.inner.prepare(sample)

    def judge(self, prepared: Sequence[Any], /) -> Sequence[ScoreResponse | SampleError]:
        """As the inner one, with a line in the log."""
        try:
            answers = self.inner.judge(prepared)
        except ConfigError:
            raise
        except Exception as error:
            self.lines.failed(len(prepared), error)
            raise
        self.lines.processed(answers)
        return answers

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()
