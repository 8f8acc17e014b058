"""The loss of a step at its embeddings, and the ordinary objective whose gradient is that of this loss.

embeddings of the step -> loss, gradient at every embedding -> for a micro-batch: embeddings times gradient, summed
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch.objective import CoupledObjective, forward_context
from truebatch.training.checks.loss_terms import check_sums
from truebatch.training.coupled.embeddings import ONLY, StepEmbeddings, read_embeddings
from truebatch.training.distributed.collectives import rank


@dataclass(frozen=True, slots=True, eq=False)
class InjectedGradients:
    """A coupled objective at the embeddings of one step: its terms are sums over samples, with the gradient of the loss.

    Their values are 0; `with_loss` puts in those of the loss.
    """

    objective: CoupledObjective
    step: StepEmbeddings
    values: Mapping[str, Tensor]
    """Every term of the whole step."""
    gradients: Mapping[str, Mapping[str, Tensor]]
    """Term -> name -> gradient at these entries, or at what is added up."""
    place_of: Mapping[int, int]
    """Sample id -> place in the step."""

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Those of the objective."""
        return self.objective.counts(batch)

    def hold(self, model: nn.Module, batch: MicroBatch) -> AbstractContextManager[None]:
        """What the objective needs to stay in place through forward and backward."""
        return forward_context(self.objective, model, batch)

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """The embeddings times the gradient of the loss at them, less what that comes to."""
        return self.sums_of(read_embeddings(self.objective.embed(model, batch), batch, self.objective), batch)

    def sums_of(self, found: StepEmbeddings, batch: MicroBatch) -> dict[str, Tensor]:
        """The same from what `embed` has given."""
        # Sharded parameters: a rank with nothing to do runs a sample that is not in the step, without effect.
        is_of_step = all(i in self.place_of for i in batch.sample_ids)
        samples = np.array([self.place_of[i] for i in batch.sample_ids] if is_of_step else [], dtype=np.int64)
        zero = next(iter(self.values.values())).new_zeros(())
        sums = {}
        for term, gradients in self.gradients.items():
            total = zero
            for name, gradient in gradients.items():
                if name in found.totals:
                    total = total + _product(found.totals[name], gradient if is_of_step else None)
                else:
                    places = torch.from_numpy(self.step.entries[name].places(samples)).to(gradient.device)
                    total = total + _product(found.entries[name].values, gradient[places] if is_of_step else None)
            sums[term] = total - total.detach()
        return sums

    def with_loss(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These sums with the values of the loss, which are those of all ranks: rank 0 has them."""
        share = 1.0 if rank() == 0 else 0.0
        return {name: value + self.values[name].to(value) * share for name, value in sums.items()}


def _product(values: Tensor, gradient: Tensor | None) -> Tensor:
    wide = _wide(values)
    return wide.sum() * 0.0 if gradient is None else (wide * gradient).sum()


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def inject(objective: CoupledObjective, step: StepEmbeddings, *, needs_gradient: bool = True) -> InjectedGradients:
    """The loss of a step and its gradient at the embeddings, in fp32 at least."""
    kind = next(iter([*(one.values for one in step.entries.values()), *step.totals.values()])).device.type
    leaves: dict[str, Tensor] = {}
    for name, value in {**{name: one.values for name, one in step.entries.items()}, **step.totals}.items():
        leaf = value.float() if name in step.totals else value
        leaves[name] = _wide(leaf.detach()).requires_grad_() if leaf.is_floating_point() else leaf
    with torch.set_grad_enabled(needs_gradient), torch.autocast(kind, enabled=False):
        terms = objective.loss(_in_form(step, leaves))
        check_sums(terms)
        _check_terms_named(terms)
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad and needs_gradient}
        gradients = {term: _gradients(total, wanted) for term, total in terms.items()}
    values = {term: total.detach() for term, total in terms.items()}
    return InjectedGradients(objective, step, values, gradients, {i: at for at, i in enumerate(step.ids)})


def _in_form(step: StepEmbeddings, leaves: Mapping[str, Tensor]) -> Any:
    """As `embed` gave it for a micro-batch."""
    given = {name: step.entries[name].given(x) if name in step.entries else x for name, x in leaves.items()}
    return given[ONLY] if list(given) == [ONLY] else given


def _check_terms_named(terms: Mapping[str, Tensor]) -> None:
    if not terms:
        raise ConfigError("`loss` of a coupled objective gave no term", seen="{}", do="return at least one named sum")


def _gradients(total: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not total.requires_grad or not leaves:
        return {}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
