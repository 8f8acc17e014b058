"""Bisect a failing batch to the sample at fault; all its other samples are still scored.

raises -> halves -> ... -> one sample: a record.    out of memory -> halves, and a smaller budget from then on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from truebatch.errors import ConfigError
from truebatch.scoring.backends.interface import SampleError, ScoreResponse
from truebatch.scoring.store.outcome import Outcome, failed
from truebatch.training.memory.oom import free_memory, is_out_of_memory

Judge = Callable[[Sequence[Any]], Sequence[ScoreResponse | SampleError]]


@dataclass(slots=True)
class FailureStats:
    """Counts for the statistics of the run."""

    calls: int = 0
    """Calls of the model."""
    splits: int = 0
    """Splits after out of memory."""
    bisections: int = 0
    """Splits after any other error."""
    too_many_cells: int | None = None
    """The smallest size that did not fit: larger batches are then split without being tried."""

    def add(self, other: FailureStats) -> None:
        """Add the counts of another worker."""
        self.calls, self.splits = self.calls + other.calls, self.splits + other.splits
        self.bisections += other.bisections


def judge_all(
    judge: Judge, keys: Sequence[str], prepared: Sequence[Any], trouble: FailureStats, lengths: Sequence[int] = ()
) -> list[Outcome]:
    """Score a batch: one outcome per key, in order, whatever the model does; only configuration errors are raised.

    A batch that raises is halved and both halves are run again, down to the single sample that is then recorded. With
    `lengths`, a batch as large as one that ran out of memory is halved at once: the parts are the same either way.
    """
    if len(keys) != len(prepared):
        raise AssertionError("a key belongs to every prepared sample")
    if not keys:
        return []
    cells = len(keys) * max(lengths, default=0)
    is_known = bool(cells) and trouble.too_many_cells is not None and cells >= trouble.too_many_cells and len(keys) > 1
    answers, error, is_memory = (None, "", True) if is_known else _try(judge, prepared, trouble)
    if is_memory and not is_known:
        free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"), said=error)
        if cells and len(keys) > 1:
            trouble.too_many_cells = min(cells, trouble.too_many_cells or cells)
        if len(keys) == 1:  # the kernels that failed with out of memory have finished now
            answers, error, is_memory = _try(judge, prepared, trouble)
    if answers is not None:
        return [outcome_of(key, answer) for key, answer in zip(keys, answers, strict=True)]
    if len(keys) == 1:
        kind = "out_of_memory" if is_memory else _kind(error)
        return [failed(keys[0], stage="model", kind=kind, message=error)]
    trouble.splits += is_memory
    trouble.bisections += not is_memory
    middle = (len(keys) + 1) // 2
    first = judge_all(judge, keys[:middle], prepared[:middle], trouble, lengths[:middle])
    return first + judge_all(judge, keys[middle:], prepared[middle:], trouble, lengths[middle:])


def judge_ready(
    judge: Judge, ready: Sequence[tuple[str, Any, int]], trouble: FailureStats, *, attempts: int = 1
) -> list[Outcome]:
    """Outcomes of a batch of (key, prepared or why not, length), in order: samples that could not be prepared are
    recorded as failures."""
    good = [one for one in ready if not isinstance(one[1], SampleError)]
    keys, prepared, lengths = [key for key, _, _ in good], [one for _, one, _ in good], [n for _, _, n in good]
    found = judge_all(judge, keys, prepared, trouble, lengths)
    by_key = {one.key: one if one.attempts == attempts else replace(one, attempts=attempts) for one in found}
    by_key |= {key: failure(key, one, attempts) for key, one, _ in ready if isinstance(one, SampleError)}
    return [by_key[key] for key, _, _ in ready]


def failure(key: str, error: SampleError, attempts: int = 1) -> Outcome:
    """The record of a sample that cannot be scored."""
    return failed(key, stage=error.stage, kind=error.kind, message=str(error), attempts=attempts, output=error.output)


def _kind(error: str) -> str:
    """The kind under which a failure is counted."""
    return {"WorkerCrash": "crashed", "WorkerHang": "hung", "NonFiniteError": "nonfinite"}.get(
        error.partition(":")[0], "raised"
    )


def _try(
    judge: Judge, prepared: Sequence[Any], trouble: FailureStats
) -> tuple[Sequence[ScoreResponse | SampleError] | None, str, bool]:
    trouble.calls += 1
    try:
        answers = judge(prepared)
    except ConfigError:
        raise
    except Exception as error:  # any exception of a model becomes a record of its sample
        return None, f"{type(error).__name__}: {error}", is_out_of_memory(error)
    if len(answers) != len(prepared):
        raise ConfigError(
            "a backend must return a result for every sample",
            seen=f"{len(answers)} results for {len(prepared)} samples",
            do="return one result per sample, in the given order",
        )
    return answers, "", False


def outcome_of(key: str, answer: ScoreResponse | SampleError, attempts: int = 1) -> Outcome:
    """The record of a scored sample; a score that is not a number is a failure."""
    if isinstance(answer, SampleError):
        return failure(key, answer, attempts)
    if answer.score is not None and not float("-inf") < answer.score < float("inf"):
        return failed(
            key,
            stage="model",
            kind="nonfinite",
            message=f"the score is {answer.score}",
            attempts=attempts,
            output=answer.output,
        )
    return Outcome(
        key=key, status="ok", score=answer.score, output=answer.output, tokens=answer.tokens, attempts=attempts
    )
