"""The loss of an engine as samples can be compared by, alone and as they were cut: a coupled one at its embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch
from truebatch.objective import CoupledObjective, forward_context
from truebatch.training.coupled.embeddings import SampleEntries, StepEmbeddings, read_embeddings
from truebatch.training.coupled.injected import InjectedGradients, inject
from truebatch.training.step import StepEngine, embed_samples


@dataclass(frozen=True, slots=True, eq=False)
class ComparedEmbeddings:
    """A coupled loss sample by sample: its value is read from the embeddings, its gradient is that of the step's loss."""

    injected: InjectedGradients
    compared: ClassVar[Literal["embeddings"]] = "embeddings"

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Those of the objective."""
        return self.injected.counts(batch)

    def hold(self, model: nn.Module, batch: MicroBatch) -> AbstractContextManager[None]:
        """As the objective."""
        return self.injected.hold(model, batch)

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """For every term all embeddings along one direction, with the gradient of the term."""
        objective = self.injected.objective
        found = read_embeddings(objective.embed(model, batch), batch, objective)
        seen = _along_all(found).detach()
        return {term: zero + seen for term, zero in self.injected.sums_of(found, batch).items()}


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingsAlone:
    """The embeddings of a coupled loss as outputs, and their sum along one direction as the loss: `verify` compares them for
    any samples, of a step or not."""

    objective: CoupledObjective

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Samples."""
        return {"embeddings": batch.num_samples}

    def hold(self, model: nn.Module, batch: MicroBatch) -> AbstractContextManager[None]:
        """As the objective."""
        return forward_context(self.objective, model, batch)

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """All embeddings along one direction."""
        return self.outputs_and_sums(model, batch)[1]

    def outputs_and_sums(
        self, model: nn.Module, batch: MicroBatch
    ) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """The embeddings of every sample, and all of them along one direction."""
        found = read_embeddings(self.objective.embed(model, batch), batch, self.objective)
        outputs = {name or "embeddings": list(one.given(one.values.detach())) for name, one in found.entries.items()}
        return outputs, {"embeddings": _along_all(found)}


def _along_all(found: StepEmbeddings) -> Tensor:
    """One number that every entry of these embeddings moves."""
    weights = torch.cos(torch.tensor(found.ids, dtype=torch.float64))
    parts = [_along(*_rows_and_weights(one, weights)) for one in found.entries.values()]
    parts += [_along(total.reshape(1, -1), torch.ones(1)) for total in found.totals.values()]
    return torch.stack(parts).sum()


def _rows_and_weights(one: SampleEntries, weights: Tensor) -> tuple[Tensor, Tensor]:
    sizes = torch.ones(len(weights), dtype=torch.int64) if one.sizes is None else torch.tensor(one.sizes)
    rows = one.values.flatten(1) if one.values.ndim > 1 else one.values[:, None]
    return rows, torch.repeat_interleave(weights, sizes)


def _along(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows along one direction, summed by weights of their samples: what is taken from one and added to another shows."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    direction = torch.cos(1.0 + torch.arange(rows.shape[-1], device=rows.device))
    return ((wide * direction).sum(-1) * weights.to(wide)).sum()


def comparable(engine: StepEngine, batches: Sequence[MicroBatch], *, epoch: int) -> StepEngine:
    """The same engine with a loss that is a sum over samples; a coupled one is taken at the embeddings of this rank's
    share of the step, so that some of its samples can be run alone with the gradient they have there."""
    if not isinstance(engine.objective, CoupledObjective):
        return engine
    step = embed_samples(replace(engine, guard=None, exchanges=False), batches, epoch=epoch)
    if step is None:
        return engine
    return replace(engine, objective=ComparedEmbeddings(inject(engine.objective, step.in_order())))
