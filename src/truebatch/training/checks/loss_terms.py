"""Whether an objective says what it must: terms by name, each a sum, and the counts that were declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from truebatch.training.step import StepEngine


def check_sums(sums: Any) -> None:
    """Raise `ConfigError` for what an objective gives unless it names its terms, each a tensor of no axes."""
    if not isinstance(sums, Mapping):
        raise ConfigError(
            "an objective's `sums` must name its terms",
            seen=f"a {type(sums).__name__}",
            do="return {'nll': total}",
        )
    for name, value in sums.items():
        if not isinstance(value, Tensor) or value.ndim:
            raise ConfigError(
                f"the sum of {name!r} must be a tensor of no axes",
                seen=f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}",
                do="add it up over the micro-batch (reduction='sum'), and leave it a tensor",
            )


def check_declared(batch: MicroBatch, counts: Mapping[str, int]) -> None:
    """Raise `BatchError` if the plan declares another count than the micro-batch has."""
    wrong = {k: (n, counts[k]) for k, n in batch.counts.items() if k in counts and counts[k] != n}
    if wrong:
        term, (said, real) = next(iter(wrong.items()))
        raise BatchError(
            f"the count of {term!r} is not what was declared",
            seen=f"{real} in the micro-batch of samples {list(batch.sample_ids[:8])}, {said} in the plan",
            do="make `measure` and the objective count the same thing; the loss would be divided by the wrong number",
        )


def stand_in_of(engine: StepEngine) -> MicroBatch:
    """What a rank runs, without effect, when it has nothing to do and sharded parameters need every rank."""
    if engine.stand_in is None:
        raise BatchError(
            "a rank has nothing to do in this step, and sharded parameters need every rank to run",
            seen="an empty micro-batch and no stand-in",
            do="give Engine(stand_in=...) a function that returns any micro-batch; train() does",
        )
    return engine.stand_in()


@contextmanager
def index_errors_named(batch: MicroBatch) -> Iterator[None]:
    """Around a call of the objective: an index that the model has no row for names the samples."""
    try:
        yield
    except IndexError as error:
        raise BatchError(
            f"the model or the loss has no row for an index in the data: {str(error)[:120]}",
            seen=f"in the micro-batch of samples {list(batch.sample_ids[:16])}",
            do="look for token ids or labels below 0 or beyond the vocabulary, the positions or the classes",
        ) from error
