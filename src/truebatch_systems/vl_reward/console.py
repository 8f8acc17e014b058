"""The log lines of the original script, written while images are judged, whatever the judge.

Batches are consecutive images of a category, so `Processed batch 0-3` are its images 0 to 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeVar

import torch

from truebatch.errors import ConfigError
from truebatch.language.console import one_line
from truebatch.scoring.backends.interface import Backend, Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.bisect import FailureStats, judge_all
from truebatch.scoring.store.outcome import Outcome
from truebatch.training.memory.oom import free_memory, is_out_of_memory

Say = Callable[[str], None]
Answer = ScoreResponse | SampleError
JUDGE = "[Qwen3VLRewardModel]"
RULE = "=" * 60
ONE_BY_ONE = 16
"""A batch of up to this many images that fails is judged one by one; a larger one is halved first."""
_Tag = TypeVar("_Tag")


@dataclass(frozen=True, slots=True)
class Placed:
    """A prepared sample with its id."""

    id: str
    prepared: Any


@dataclass(slots=True)
class ScoreLog:
    """Logs batches by the indices of their images, and each category when it begins and ends."""

    say: Say
    batch_size: int
    images: Mapping[str, Sequence[str]]
    """Category -> the ids of its images, in order. A category without a name has no lines of its own."""
    places: dict[str, tuple[str, int]] = field(init=False)
    begun: set[str] = field(default_factory=set, init=False)
    ended: set[str] = field(default_factory=set, init=False)
    scores: dict[str, float | None] = field(default_factory=dict, init=False)
    lock: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        self.places = {id_: (name, at) for name, ids in self.images.items() for at, id_ in enumerate(ids)}

    def begin(self, ids: Sequence[str]) -> None:
        """Log the beginning of a category that these images belong to."""
        with self.lock:
            for name in dict.fromkeys(self.places[one][0] for one in ids):
                if name and name not in self.begun:
                    self.begun.add(name)
                    self._say_begin(name)

    def processed(self, ids: Sequence[str], answers: Sequence[Answer]) -> None:
        """Log a batch that was judged: `Processed batch 0-3: avg_score=7.234`, with its failures beside the mean."""
        scores = [one.score for one in answers if isinstance(one, ScoreResponse) and one.score is not None]
        failed = len(answers) - len(scores)
        mean = f"{sum(scores) / len(scores):.3f}" if scores else "-"
        more = f" ({failed} without a score)" if failed else ""
        with self.lock:
            if len(ids) == 1:
                self.say(f"{JUDGE} Processed image {self._range(ids)}: score={mean}{more}")
            else:
                self.say(f"{JUDGE} Processed batch {self._range(ids)}: avg_score={mean}{more}")
            for one, answer in zip(ids, answers, strict=True):
                self.scores[one] = answer.score if isinstance(answer, ScoreResponse) else None
            for name in dict.fromkeys(self.places[one][0] for one in ids):
                self._end(name)

    def failed(self, ids: Sequence[str], error: Exception) -> None:
        """Log a batch that failed as a whole; its images come next."""
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        with self.lock:
            self.say(f"{JUDGE} Error in batch {self._range(ids)}: {words}")
            if 1 < len(ids) <= ONE_BY_ONE:
                self.say(f"{JUDGE} Falling back to sequential processing for this batch...")
            elif len(ids) > 1:
                self.say(f"{JUDGE} Halving this batch...")

    def _range(self, ids: Sequence[str]) -> str:
        places = sorted(self.places[one][1] for one in ids)
        return f"{places[0]}-{places[-1]}" if len(places) > 1 else str(places[0])

    def _say_begin(self, name: str) -> None:
        number = len(self.images[name])
        self.say(f"[stage 2/2] scoring images in batches - {one_line(name)}")
        self.say(RULE)
        self.say(f"{JUDGE} {number} valid images to score...")
        self.say(f"{JUDGE} Batch scoring {number} images with batch_size={self.batch_size}")

    def _end(self, name: str) -> None:
        """Log the end of a category, if all its images are judged. One that was resumed is told from its journal."""
        if name and name not in self.ended and all(one in self.scores for one in self.images[name]):
            self.ended.add(name)
            found = [score for one in self.images[name] if (score := self.scores[one]) is not None]
            say_category(self.say, name, len(self.images[name]), sum(found) / len(found) if found else None)


def say_category(say: Say, name: str, images: int, mean: float | None) -> None:
    """Log the end of a category."""
    if mean is not None:
        say(f"✅ scoring done, mean score: {mean:.3f}")
    say(RULE)
    say(f"[done] {one_line(name)} - {images} samples processed")
    if mean is not None:
        say(f"mean score: {mean:.3f}")
    say(RULE)


@dataclass(frozen=True)
class LoggedBackend:
    """A backend whose batches are logged, and share no image with another category."""

    inner: Backend
    log: ScoreLog

    def describe(self) -> Mapping[str, Any]:
        """As the inner one."""
        return self.inner.describe()

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """As the inner one, grouped by category."""
        return replace(self.inner.cost(sample), group=self.log.places[sample.id][0])

    def prepare(self, sample: ScoreRequest, /) -> Placed:
        """As the inner one, with the id."""
        return Placed(sample.id, self.inner.prepare(sample))

    def judge(self, prepared: Sequence[Placed], /) -> Sequence[Answer]:
        """As the inner one, logged; a small batch that fails is judged one by one."""
        ids = [one.id for one in prepared]
        self.log.begin(ids)
        try:
            answers = self.inner.judge([one.prepared for one in prepared])
        except ConfigError:
            raise
        except Exception as error:
            self.log.failed(ids, error)
            if not 1 < len(prepared) <= ONE_BY_ONE:
                raise
            if is_out_of_memory(error):
                free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"), said=str(error))
        else:
            self.log.processed(ids, answers)
            return answers
        return [self._alone(one) for one in prepared]

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()

    def _alone(self, one: Placed) -> Answer:
        (outcome,) = judge_all(self.inner.judge, [one.id], [one.prepared], FailureStats())
        answer = _answer_of(outcome)
        self.log.processed([one.id], [answer])
        return answer


@dataclass(frozen=True)
class LoggedServer(LoggedBackend):
    """The same for a server, which answers requests as they are done."""

    def as_completed(
        self, prepared: Iterable[tuple[_Tag, Placed | SampleError]], is_stopped: Callable[[], bool]
    ) -> Iterator[tuple[_Tag, Answer]]:
        """As the inner one, with a line for each image."""
        ids: dict[Any, str] = {}

        def sent() -> Iterator[tuple[Any, Any]]:
            for tag, one in prepared:
                if isinstance(one, Placed):
                    ids[tag] = one.id
                    self.log.begin([one.id])
                yield tag, one.prepared if isinstance(one, Placed) else one

        for tag, answer in self.inner.as_completed(sent(), is_stopped):  # type: ignore[attr-defined]
            if tag in ids:
                self.log.processed([ids[tag]], [answer])
            yield tag, answer


def logged(inner: Backend, log: ScoreLog) -> LoggedBackend:
    """A backend with its lines in the log."""
    return (LoggedServer if hasattr(inner, "as_completed") else LoggedBackend)(inner, log)


def _answer_of(outcome: Outcome) -> Answer:
    if outcome.status == "ok":
        return ScoreResponse(score=outcome.score, output=outcome.output, tokens=outcome.tokens)
    return SampleError(outcome.stage, outcome.kind, outcome.message, outcome.output)
