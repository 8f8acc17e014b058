"""A batch that fails is cut until the failure has a name: every other sample of it is judged all the same.

raises -> halves -> ... -> one sample: a record.    out of memory -> halves, and a smaller budget from then on
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truebatch.errors import ConfigError
from truebatch.scoring.backend import Answer, SampleError
from truebatch.scoring.records import Outcome, failed
from truebatch.training.outofmemory import is_out_of_memory

Judge = Callable[[Sequence[Any]], Sequence[Answer | SampleError]]


@dataclass(slots=True)
class Trouble:
    """What was met on the way, for the run's figures."""

    calls: int = 0
    """Of the model."""
    splits: int = 0
    """After out of memory."""
    bisections: int = 0
    """After any other error."""


def judge_all(judge: Judge, keys: Sequence[str], prepared: Sequence[Any], trouble: Trouble) -> list[Outcome]:
    """One outcome for every key, in order, whatever the model does; only configuration errors are raised.

    A batch that raises is halved and both halves are run again, down to the single sample that is then recorded.
    """
    if len(keys) != len(prepared):
        raise AssertionError("a key belongs to every prepared sample")
    if not keys:
        return []
    answers, error, is_memory = _try(judge, prepared, trouble)
    if answers is not None:
        return [_outcome(key, answer) for key, answer in zip(keys, answers, strict=True)]
    if is_memory:
        _free()  # Outside of any except block: a live traceback would hold the tensors.
    if len(keys) == 1:
        kind = "out_of_memory" if is_memory else "raised"
        return [failed(keys[0], stage="model", kind=kind, message=error)]
    trouble.splits += is_memory
    trouble.bisections += not is_memory
    middle = (len(keys) + 1) // 2
    first = judge_all(judge, keys[:middle], prepared[:middle], trouble)
    return first + judge_all(judge, keys[middle:], prepared[middle:], trouble)


def _try(
    judge: Judge, prepared: Sequence[Any], trouble: Trouble
) -> tuple[Sequence[Answer | SampleError] | None, str, bool]:
    trouble.calls += 1
    try:
        answers = judge(prepared)
    except ConfigError:
        raise
    except Exception as error:  # whatever a foreign model raises becomes a record of the sample it belongs to
        return None, f"{type(error).__name__}: {error}", is_out_of_memory(error)
    if len(answers) != len(prepared):
        raise ConfigError(
            "a backend must answer for every sample",
            seen=f"{len(answers)} answers for {len(prepared)} samples",
            do="return one answer a sample, in the order they were given",
        )
    return answers, "", False


def _outcome(key: str, answer: Answer | SampleError) -> Outcome:
    if isinstance(answer, SampleError):
        return failed(key, stage=answer.stage, kind=answer.kind, message=str(answer), output=answer.output)
    if answer.score is not None and not float("-inf") < answer.score < float("inf"):
        return failed(
            key, stage="model", kind="nonfinite", message=f"the score is {answer.score}", output=answer.output
        )
    return Outcome(key=key, status="ok", score=answer.score, output=answer.output, tokens=answer.tokens)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
