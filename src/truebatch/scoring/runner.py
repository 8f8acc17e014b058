"""A run: list, plan, prepare ahead, judge, commit; killed at any moment, the same call resumes.

samples -> input.jsonl -> plan.json -> what is left -> batches, prepared ahead -> judge_all -> journal
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from truebatch.errors import ConfigError, RestartError, RunError
from truebatch.progress import stage
from truebatch.scoring.backends.interface import Backend, Cost, SampleError, ScoreRequest
from truebatch.scoring.batch_plan import Batches, Limits, extend, load_batches, save_batches
from truebatch.scoring.bisect import FailureStats, failure, judge_ready
from truebatch.scoring.gc_pause import without_collecting
from truebatch.scoring.prefetch import Prefetcher, attempt, judge_each, singles, slices
from truebatch.scoring.progress import OnProgress, Progress, ProgressTracker
from truebatch.scoring.resume import Work, find_left
from truebatch.scoring.store.input_index import InputSample, save_list
from truebatch.scoring.store.journal import Journal, JournalState, open_journal, read_journals
from truebatch.scoring.store.manifest import settle_manifest
from truebatch.scoring.store.outcome import Outcome
from truebatch.training.run_dir.signals import StopFlag, catch_signals

UNPLANNED = -1
"""The number of a batch of failures that never came into the plan."""
_SETTLE_SECONDS = 600.0
_PARTS = 8
"""Of the samples that a thread measures: one part may have the expensive ones."""
_ASKED_AT_ONCE = 256
"""Samples whose cost is asked of another process in one request."""


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """A batch that an engine has judged, wherever that was."""

    work: Work
    outcomes: list[Outcome]
    seconds: float
    trouble: FailureStats


class BatchExecutor(Protocol):
    """Judges batches somewhere else; the journal is written here."""

    def __call__(
        self, work: Sequence[Work], asked: Mapping[str, ScoreRequest], lengths: Mapping[str, int]
    ) -> Iterator[JudgedBatch]:
        """Every batch once, in any order, as they come; an outcome for each of its keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How a run is carried out; nothing of it changes a score."""

    threads: int = min(8, os.cpu_count() or 1)
    """That decode and prepare samples."""
    ahead: int = 4
    """Batches prepared before they are needed, for each worker."""
    retry: Collection[str] = ()
    """Kinds of failures that are run again, such as `out_of_memory`; successes are kept."""
    shard: tuple[int, int] = (0, 1)
    """(i, n): this process judges every n-th batch; n processes share one run folder."""
    on_progress: OnProgress | None = None
    on_outcomes: Callable[[list[Outcome]], None] | None = None
    """Called with outcomes as soon as they are on the disk, first with those that were there before; an error ends the run."""
    engine: BatchExecutor | None = None
    """Who judges, where it is not the backends in this process: see `scoring.ray_engine`."""
    stop: StopFlag | None = None
    """Asks the run to stop after the batches that are being judged; None: signals do."""

    def __post_init__(self) -> None:
        at, number = self.shard
        if not 0 <= at < number:
            raise ConfigError("a shard is i/n with i from 0 to n-1", seen=f"{at}/{number}", do="write 0/8 to 7/8")
        for name in ("threads", "ahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is out of range", seen=f"{name}={getattr(self, name)}", do="give 1 or more")


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What a call of `run_samples` did."""

    trouble: FailureStats
    seconds: float
    judged: int
    """Samples of this call."""

    def and_then(self, other: RunTotals) -> RunTotals:
        """What both did, one after the other."""
        trouble = replace(self.trouble)
        trouble.add(other.trouble)
        return RunTotals(trouble, self.seconds + other.seconds, self.judged + other.judged)


def run_samples(
    listed: Sequence[InputSample], backends: Sequence[Backend], run: Path, limits: Limits, how: RunConfig
) -> RunTotals:
    """Judge every sample that has no result yet; one outcome for each is in the journal afterwards.

    Each backend is a worker and takes the next batch when it is free. A signal ends the run after the batches that are
    being judged, with `RestartError`: the same call resumes.
    """
    began = time.monotonic()
    with _owning(run, how.shard):
        asked = {one.key: one.asked for one in listed if one.asked is not None}
        batches = _settle(listed, asked, backends[0], run, limits, how)
        journals = read_journals(run)
        left = find_left(batches, journals, asked=asked, retry=how.retry, shard=how.shard)
        following = _following(listed, batches, journals, how)
        following.begin()
        _tell_known(listed, journals, how)
        if left.crashed:
            _record(run, left.crashed, how, following)
        with catch_signals() if how.stop is None else nullcontext(how.stop) as stop:
            judged, trouble = _judge_left(left.work, asked, backends, run, how, (following, stop))
        if judged < sum(len(work.keys) for work in left.work):
            end_early(stop, run, judged)
    return RunTotals(trouble, time.monotonic() - began, judged)


def end_early(stop: StopFlag, run: Path, judged: int) -> None:
    """Raise `RestartError` if the run was asked to stop."""
    if stop.requested is not None:
        raise RestartError(
            f"{stop.requested}; {judged:,} samples were judged by this call and are kept",
            seen=str(run),
            do="run the same command again to resume",
        )


@contextmanager
def _owning(run: Path, shard: tuple[int, int]) -> Iterator[None]:
    """One process a shard: two would do the same work twice."""
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / f".shard-{shard[0]}-of-{shard[1]}.lock")
    try:
        with lock.acquire(timeout=0):
            yield
    except Timeout as error:
        raise RunError(
            f"another process is scoring into {run}",
            seen=f"shard {shard[0]}/{shard[1]} is taken",
            do="wait for it, or share the work: --shard 0/2 and --shard 1/2",
        ) from error


@stage("planning batches")
def _settle(
    listed: Sequence[InputSample],
    asked: Mapping[str, ScoreRequest],
    backend: Backend,
    run: Path,
    limits: Limits,
    how: RunConfig,
) -> Batches:
    """Compare the configuration, keep the input, plan what is not planned; one process at a time."""
    with FileLock(run / ".settle.lock", timeout=_SETTLE_SECONDS):
        settle_manifest(run, {**backend.describe(), "sameness": limits.describe()})
        save_list(run, listed)
        known, journals = load_batches(run), read_journals(run)
        failures = {
            one.key: one.failure for one in listed if one.failure is not None and one.key not in journals.results
        }
        planned = {key for batch in known.batches for key in batch}
        fresh = [key for key in asked if key not in planned and _is_open(key, journals, how.retry)]
        costs, refused = _costs(fresh, asked, backend, how.threads)
        if failures or refused:
            _record(run, [*failures.values(), *refused], how, None)
        with without_collecting():
            batches = extend(known, costs, set(asked) | set(journals.results), limits)
            if batches.batches != known.batches:
                save_batches(run, batches)
        return batches


def _is_open(key: str, journals: JournalState, retry: Collection[str]) -> bool:
    state = journals.results.state(key)
    return state is None or (state[0] == "failed" and state[2] in retry)


@stage("measuring samples, to plan their batches")
def _costs(
    keys: Sequence[str], asked: Mapping[str, ScoreRequest], backend: Backend, threads: int
) -> tuple[dict[str, Cost], list[Outcome]]:
    """What each sample will take, and the failures of those that cannot even be measured."""
    found = cost_all(backend, [asked[key] for key in keys], threads)
    costs = {key: cost for key, cost in zip(keys, found, strict=True) if isinstance(cost, Cost)}
    refused = [failure(key, cost) for key, cost in zip(keys, found, strict=True) if isinstance(cost, SampleError)]
    return costs, refused


def cost_all(backend: Backend, samples: Sequence[ScoreRequest], threads: int = 1) -> list[Cost | SampleError]:
    """What each sample will take, or why that cannot be said; of a backend in another process many at once."""
    many = getattr(backend, "costs", None)
    if many is not None:
        starts = range(0, len(samples), _ASKED_AT_ONCE)
        return [cost for at in starts for cost in many(samples[at : at + _ASKED_AT_ONCE])]

    def some(part: Sequence[ScoreRequest]) -> list[Cost | SampleError]:
        return [attempt(backend.cost, sample) for sample in part]

    with ThreadPoolExecutor(threads, thread_name_prefix="measure") as pool:
        return [cost for found in pool.map(some, slices(samples, threads * _PARTS)) for cost in found]


def _tell_known(listed: Sequence[InputSample], journals: JournalState, how: RunConfig) -> None:
    if how.on_outcomes is not None:
        keys = dict.fromkeys(one.key for one in listed if not _is_open(one.key, journals, how.retry))
        how.on_outcomes([journals.results[key] for key in keys])


def _record(run: Path, outcomes: Sequence[Outcome | None], how: RunConfig, following: ProgressTracker | None) -> None:
    """Commit outcomes that need no model."""
    rows = list({outcome.key: outcome for outcome in outcomes if outcome is not None}.values())
    with open_journal(run, worker=f"{how.shard[0]}-reader") as journal:
        journal.commit(journal.begin(UNPLANNED, [row.key for row in rows]), rows, seconds=0.0)
    if following is not None:
        _committed(rows, following, how)


def _committed(outcomes: list[Outcome], following: ProgressTracker, how: RunConfig) -> None:
    following.committed(outcomes)
    if how.on_outcomes is not None:
        how.on_outcomes(outcomes)


def _following(
    listed: Sequence[InputSample], batches: Batches, journals: JournalState, how: RunConfig
) -> ProgressTracker:
    planned = {key: number % how.shard[1] for number, batch in enumerate(batches.batches) for key in batch}
    keys = {one.key for one in listed if planned.get(one.key, 0) == how.shard[0]}
    tokens = {key: number for key, number in (batches.tokens or {}).items() if key in keys}
    done = [(key, journals.results.state(key)) for key in keys if not _is_open(key, journals, how.retry)]
    progress = Progress(
        samples=len(keys), done=len(done), failed=sum(state is not None and state[0] == "failed" for _, state in done),
        tokens=sum(tokens.values()), tokens_done=sum(tokens.get(key, 0) for key, _ in done),
    )  # fmt: skip
    return ProgressTracker(progress, tokens, how.on_progress)


Shared = tuple[ProgressTracker, StopFlag]


def _judge_left(
    work: Sequence[Work],
    asked: Mapping[str, ScoreRequest],
    backends: Sequence[Backend],
    run: Path,
    how: RunConfig,
    shared: Shared,
) -> tuple[int, FailureStats]:
    if how.engine is not None:
        return _collect(how.engine(work, asked, shared[0].tokens_of), run, how, shared)
    batches = how.ahead * len(backends)
    if _answers_one_by_one(backends):
        work, batches = singles(work), batches * how.threads
    ahead = Prefetcher(work, asked, backends[0].prepare, threads=how.threads, batches=batches)
    names = [f"{how.shard[0]}-{number}" for number in range(len(backends))]
    try:
        if len(backends) == 1:
            return _work(names[0], backends[0], ahead, run, how, shared)
        with ThreadPoolExecutor(len(backends), thread_name_prefix="judge") as pool:
            done = [
                pool.submit(_work, name, one, ahead, run, how, shared)
                for name, one in zip(names, backends, strict=True)
            ]
        troubles = [one.result() for one in done]
        for _, other in troubles[1:]:
            troubles[0][1].add(other)
        return sum(judged for judged, _ in troubles), troubles[0][1]
    finally:
        ahead.close()


def _collect(done: Iterator[JudgedBatch], run: Path, how: RunConfig, shared: Shared) -> tuple[int, FailureStats]:
    """The one writer of what an engine judges. A batch is begun when it is done: no death elsewhere is this process's."""
    following, stop = shared
    judged, trouble = 0, FailureStats()
    with open_journal(run, worker=f"{how.shard[0]}-engine") as journal, closing(done):  # type: ignore[type-var]
        for one in done:
            begun = journal.begin(one.work.number, one.work.keys, attempt=one.work.attempt)
            journal.commit(begun, one.outcomes, seconds=one.seconds)
            trouble.add(one.trouble)
            judged += len(one.outcomes)
            _committed(one.outcomes, following, how)
            if stop.requested is not None:
                break
    return judged, trouble


def _work(
    name: str, backend: Backend, ahead: Prefetcher, run: Path, how: RunConfig, shared: Shared
) -> tuple[int, FailureStats]:
    """A worker: the next batch, its outcomes onto the disk, until nothing is left or somebody asks to stop."""
    following, stop = shared
    judged, trouble = 0, FailureStats()
    with open_journal(run, worker=name) as journal, _all_or_none(ahead):
        if _answers_one_by_one([backend]):
            for work, outcome, seconds in judge_each(backend, ahead, stop):
                journal.commit(journal.begin(work.number, work.keys, attempt=work.attempt), [outcome], seconds=seconds)
                _committed([outcome], following, how)
                judged, trouble.calls = judged + 1, trouble.calls + 1
        while stop.requested is None and (ready := ahead.take()) is not None:
            work, prepared = ready
            lengths = [following.tokens_of.get(key, 0) for key in work.keys]
            outcomes = _judge(journal, backend, work, list(zip(work.keys, prepared, lengths, strict=True)), trouble)
            _committed(outcomes, following, how)
            judged += len(outcomes)
    return judged, trouble


def _answers_one_by_one(backends: Sequence[Backend]) -> bool:
    return all(hasattr(backend, "as_completed") for backend in backends)


@contextmanager
def _all_or_none(ahead: Prefetcher) -> Iterator[None]:
    """An error of one worker ends the run: the others finish their batch and take no other."""
    try:
        yield
    except BaseException:
        ahead.stop()
        raise


def _judge(
    journal: Journal, backend: Backend, work: Work, ready: Sequence[tuple[str, Any, int]], trouble: FailureStats
) -> list[Outcome]:
    begun = journal.begin(work.number, work.keys, attempt=work.attempt)
    started = time.monotonic()
    outcomes = judge_ready(backend.judge, ready, trouble, attempts=work.attempt)
    journal.commit(begun, outcomes, seconds=time.monotonic() - started)
    return outcomes
