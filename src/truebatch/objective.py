"""What a task supplies: each term of its loss as a sum and a count, divided once over the whole step.

A mean per micro-batch would weight a token by how full its micro-batch happens to be. One sum divided
by one count does not, however the step is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import BatchError


@runtime_checkable
class Objective(Protocol):
    """The loss of a task, one number a term.

    >>> from truebatch import Objective
    >>> class Squares:
    ...     def counts(self, batch):
    ...         return {"loss": batch.num_samples}
    ...     def sums(self, model, batch):
    ...         return {"loss": model(batch["x"]).square().sum()}
    >>> isinstance(Squares(), Objective)
    True
    """

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """What each term is divided by, as far as this micro-batch goes; known before the forward pass."""
        ...

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """Each term summed, never averaged, over this micro-batch."""
        ...


def forward_context(objective: Objective, model: nn.Module, batch: MicroBatch) -> AbstractContextManager[None]:
    """What an objective needs to stay in place through forward and backward: its own `hold`, or nothing.

    Gradient checkpointing runs layers again in backward, and they must then find what they found in forward.
    """
    hold = getattr(objective, "hold", None)
    found: AbstractContextManager[None] = nullcontext() if hold is None else hold(model, batch)
    return found


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The count of each term over all micro-batches of a step."""
    total: dict[str, int] = {}
    for one in counts:
        for name, n in one.items():
            total[name] = total.get(name, 0) + int(n)
    return total


def divide_once(sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> Tensor:
    """The share of a step's loss that these sums make up; `counts` are those of the whole step.

    A term with nothing to count in this step (count 0) adds 0, not NaN.
    """
    missing = sorted(set(sums) - set(counts))
    if missing:
        raise BatchError(
            f"loss terms without a count: {missing}",
            seen=f"sums for {sorted(sums)}, counts for {sorted(counts)}",
            do="return a count for each term from the objective's `counts`",
        )
    if not sums:
        raise BatchError("an objective gave no loss term", seen="sums() -> {}", do="return at least one named sum")
    parts = [total / max(counts[name], 1) for name, total in sums.items()]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
