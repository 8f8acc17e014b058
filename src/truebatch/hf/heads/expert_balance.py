"""The balance of experts as transformers defines it, over the tokens of the whole step instead of those of a micro-batch.

routers -> how often each expert was chosen, sum of its probabilities -> added up over the step -> experts * sum of f * P
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import BatchError, ConfigError, LawError
from truebatch.hf.heads.objective import HeadObjective
from truebatch.hf.mixers.trial_rows import without_router_outputs
from truebatch.objective import CoupledObjective

TERM = "balance"


def is_balanced(config: Any) -> bool:
    """Whether a configuration asks for the balancing loss of its experts."""
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


def routers_of(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The modules whose output holds the router's logits, in order, and at which place; empty where transformers names none."""
    recorders = [
        recorder
        for part in model.modules()
        if (recorder := (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")) is not None
    ]
    return [
        (module, getattr(recorder, "index", 0))
        for recorder in recorders[:1]
        for name, module in model.named_modules()
        if type(module) is recorder.target_class and (getattr(recorder, "layer_name", None) or "") in name
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedExperts(CoupledObjective):
    """The loss of a language model beside the balance of its experts, which couples the tokens of a step.

    As `load_balancing_loss_func` of transformers: over all layers and all tokens of the step, f is how often an expert is
    among the chosen ones of a token, P its mean probability, and the balance the number of experts times the sum of f * P.
    """

    own: HeadObjective
    experts: int
    chosen: int
    """Experts of a token."""
    weight: float
    """`router_aux_loss_coef`."""
    added: ClassVar[tuple[str, ...]] = ("own", "chosen", "probability", "rows", "tokens")
    couplings: ClassVar[tuple[str, ...]] = ("expert balancing",)

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Labels, and tokens for the balance."""
        return {**self.own.counts(batch), TERM: sum(batch.rows().lengths)}

    def hold(self, model: nn.Module, batch: MicroBatch) -> AbstractContextManager[None]:
        """As the head."""
        return self.own.hold(model, batch)

    def embed(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """The loss of the head, and what its routers add up to over the tokens of this micro-batch."""
        with _router_logits(model) as seen:
            (own,) = self.own.sums(model, batch).values()
        cells = batch.rows().cell_of_token
        totals = [torch.zeros(self.experts, device=own.device) for _ in range(2)]
        for logits in seen:
            _check_logits(logits, batch, self.experts)
            probability = torch.softmax(logits.flatten(0, -2)[cells].float(), dim=-1)
            places = probability.topk(self.chosen, dim=-1).indices.flatten()
            totals[0] = totals[0].scatter_add(0, places, torch.ones_like(places, dtype=torch.float32))
            totals[1] = totals[1] + probability.sum(0)
        tokens = own.new_full((), float(len(cells)), dtype=torch.float32)
        return {"own": own, "chosen": totals[0], "probability": totals[1], "rows": tokens * len(seen), "tokens": tokens}

    def loss(self, embeddings: Any) -> dict[str, Tensor]:
        """The head's own sum, and the balance times its tokens, by which it is divided."""
        chosen, probability = (embeddings[name] / embeddings["rows"] for name in ("chosen", "probability"))
        balance = self.weight * self.experts * (chosen * probability).sum()
        return {self.own.head.loss.term: embeddings["own"], TERM: balance * embeddings["tokens"]}


@contextmanager
def _router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """While open, what every router gives is kept; afterwards that of the last call, layer after layer."""
    seen: list[Tensor] = []
    routers = routers_of(model)
    hooks = [
        router.register_forward_hook(lambda _module, _args, output, at=at: seen.append(_at(output, at)))
        for router, at in routers
    ]
    try:
        with without_router_outputs(model):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()
        del seen[: -len(routers)]  # what was tried before the rows themselves


def _at(output: Any, at: int) -> Tensor:
    found: Tensor = output[at] if isinstance(output, tuple | list) else output
    return found


def _check_logits(logits: Tensor, batch: MicroBatch, experts: int) -> None:
    if logits.shape[:-1].numel() != batch.segments.num_cells or logits.shape[-1] != experts:
        raise BatchError(
            "the routers of this model do not see the rows of the micro-batch",
            seen=f"logits of shape {tuple(logits.shape)} for {batch.segments.num_cells} cells and {experts} experts",
            do="set output_router_logits=False",
        )
    if torch.is_grad_enabled() and not logits.requires_grad:
        raise ConfigError(
            "no gradient comes from the routers",
            seen="gradient checkpointing with use_reentrant=True, or everything before them is frozen",
            do="use gradient checkpointing without use_reentrant, or set output_router_logits=False",
        )


def balanced_objective(own: HeadObjective, model: nn.Module, config: Any) -> BalancedExperts:
    """The objective of a language model whose configuration asks for balanced experts; `LawError` if its routers are not
    known."""
    text = config.get_text_config()
    experts = next((n for name in ("num_local_experts", "num_experts") if (n := getattr(text, name, None))), None)
    chosen, weight = getattr(text, "num_experts_per_tok", None), getattr(text, "router_aux_loss_coef", None)
    is_known = experts is not None and chosen is not None and weight is not None and routers_of(model)
    if not is_known or own.head.kind.name != "causal_lm":
        raise LawError(
            "the balancing loss of these experts cannot be taken over the step",
            seen=f"{type(model).__name__}, {len(routers_of(model))} routers, router_aux_loss_coef={weight}",
            do="set output_router_logits to false in the model's config.json",
        )
    return BalancedExperts(own=own, experts=experts, chosen=chosen, weight=weight)  # type: ignore[arg-type]
