"""Samples are decoded and prepared in threads, a few batches before the model needs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.scoring.backends.interface import Backend, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.bisect import outcome_of
from truebatch.scoring.resume import Work
from truebatch.scoring.store.outcome import Outcome
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.training.run_dir.signals import StopFlag

Ready = tuple[Work, list[Any]]
"""A batch, and for each of its keys what was prepared, or the `SampleError` that was met."""


class Prefetcher:
    """Hands out batches in order, prepared; several workers may take them."""

    def __init__(
        self, work: Sequence[Work], asked: Mapping[str, ScoreRequest], prepare: Callable[[ScoreRequest], Any], *,
        threads: int, batches: int,
    ) -> None:  # fmt: skip
        self._left = deque(work)
        self._asked, self._prepare, self._most = asked, prepare, batches
        self._begun: deque[tuple[Work, list[Future[list[Any]]]]] = deque()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._lock = Lock()

    def take(self) -> Ready | None:
        """The next batch; None when all are taken."""
        with self._lock:
            self._fill()
            if not self._begun:
                return None
            work, futures = self._begun.popleft()
            self._fill()
        return work, [one for future in futures for one in future.result()]

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._left.clear()
            self._begun.clear()

    def close(self) -> None:
        """Discard what has not been taken."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        while self._left and len(self._begun) < self._most:
            work = self._left.popleft()
            parts = slices([self._asked[key] for key in work.keys], self._threads)
            self._begun.append((work, [self._pool.submit(self._some, part) for part in parts]))

    def _some(self, samples: Sequence[ScoreRequest]) -> list[Any]:
        return [attempt(self._prepare, sample) for sample in samples]


def slices(samples: Sequence[ScoreRequest], number: int) -> list[Sequence[ScoreRequest]]:
    """The samples in at most so many parts, in order: a thread task per sample would cost more than many of them take."""
    each = max(1, -(-len(samples) // number))
    return [samples[at : at + each] for at in range(0, len(samples), each)]


def attempt(step: Callable[[ScoreRequest], Any], sample: ScoreRequest) -> Any:
    """What a step of a backend makes of a sample, or a `SampleError`; only configuration errors are raised."""
    try:
        return step(sample)
    except SampleError as error:
        return error
    except ConfigError:
        raise
    except DataError as error:
        return SampleError("prepare", "unusable", f"{error.wrong}: {error.seen}")
    except Exception as error:  # whatever a template or a processor of others raises belongs to this sample
        kind = "out_of_memory" if is_out_of_memory(error) else "raised"
        return SampleError("prepare", kind, f"{type(error).__name__}: {error}")


def singles(work: Sequence[Work]) -> list[Work]:
    """Each sample as a batch of its own, in the same order."""
    return [replace(one, keys=(key,)) for one in work for key in one.keys]


def judge_each(backend: Any, ahead: Prefetcher, stop: StopFlag) -> Iterator[tuple[Work, Outcome, float]]:
    """Outcomes of single samples as they finish, with their seconds, of a backend that has `as_completed`."""

    def taken() -> Iterator[tuple[tuple[Work, float], Any]]:
        while (ready := ahead.take()) is not None:
            yield (ready[0], time.monotonic()), ready[1][0]

    for (work, began), answer in backend.as_completed(taken(), lambda: stop.requested is not None):
        yield work, outcome_of(work.keys[0], answer, work.attempt), time.monotonic() - began


def judge_prepared(backend: Backend, prepared: Sequence[Any]) -> list[ScoreResponse | SampleError]:
    """An answer for everything that could be prepared, and the errors where they stand."""
    good = [one for one in prepared if not isinstance(one, SampleError)]
    answers = iter(backend.judge(good) if good else [])
    return [one if isinstance(one, SampleError) else next(answers) for one in prepared]
