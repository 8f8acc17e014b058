"""What a task supplies: each term of its loss as a sum and a count, divided once over the whole step.

A mean per micro-batch would weight a token by how full its micro-batch happens to be. One sum divided
by one count does not, however the step is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol, runtime_checkable

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


Embeddings = Tensor | Mapping[str, Tensor | Sequence[Tensor]]
"""What a coupled loss is made of: a tensor with a row for each sample, a list with a tensor for each sample, or several of
them by name."""


class CoupledObjective(ABC):
    """A loss that couples the samples of a step: in-batch negatives, a distance between distributions, a balance.

    A step takes two passes. The first calls `embed` on every micro-batch without a graph; `loss` is called once, on the
    embeddings of the whole step and of all ranks in the order of their sample ids. The second pass calls `embed` again,
    with a graph, and the gradient of the loss goes backward through it. So the gradient is that of the whole step, however
    it is cut, and only one micro-batch at a time is in memory.

    >>> import torch
    >>> import truebatch as tb
    >>> class Spread(tb.CoupledObjective):
    ...     def counts(self, batch):
    ...         return {"spread": batch.num_samples}
    ...     def embed(self, model, batch):
    ...         return model(batch["x"])
    ...     def loss(self, embeddings):
    ...         return {"spread": (embeddings - embeddings.mean(0)).square().sum()}
    >>> fields = [tb.Field(name="x", kind="once")]
    >>> data = tb.TrainData(samples=[{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}, {"x": [5.0, 7.0]}], fields=fields)
    >>> config = tb.TrainConfig(samples_per_step=3, batch_size=1, epochs=2)
    >>> tb.train(torch.nn.Linear(2, 2), Spread(), data, config).step
    2
    """

    added: ClassVar[tuple[str, ...]] = ()
    """Names that `embed` gives as sums over the micro-batch, of any shape: they are added up over the step."""
    couplings: ClassVar[tuple[str, ...]] = ()
    """Couplings of the model, by the name they are refused by, that this loss takes over the whole step."""

    @abstractmethod
    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """What each term is divided by, as far as this micro-batch goes; known before the forward pass."""

    @abstractmethod
    def embed(self, model: nn.Module, batch: MicroBatch) -> Embeddings:
        """What the loss needs of each sample, in the order of `batch.sample_ids`: nothing in it may mix samples."""

    @abstractmethod
    def loss(self, embeddings: Any) -> dict[str, Tensor]:
        """Each term summed over the step, from what `embed` gave for all its samples, in the same form."""

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """The loss if this micro-batch were the whole step."""
        return self.loss(self.embed(model, batch))


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
