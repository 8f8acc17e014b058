"""The loss of pairs as an objective: a sum over pairs, exact however a step is cut.

micro-batch -> rows of pairs -> log-probabilities or rewards [N, 2] -> loss of each pair -> sums and counts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.attention.forward_context import packed_rows
from truebatch.hf.attention.packed import packing_plan_of
from truebatch.hf.finetune.preference.config import PreferenceConfig
from truebatch.hf.finetune.preference.losses import PairValues, pair_losses
from truebatch.hf.finetune.preference.pair_rows import longest_path, pair_rows, parts_of
from truebatch.hf.heads.heads import ModelHead, packed_attention_on, packed_part
from truebatch.hf.preference.logprobs import kept_open, read_tokens, without_adapters
from truebatch.hf.preference.reward import read_rewards
from truebatch.hf.preference.sharing import RowWay, row_way

TERM = "preference"
NLL = "nll"
REFERENCE = "reference"
"""The field with what the reference says of both answers, where it was asked before training."""


@dataclass(slots=True, eq=False)
class ReferenceModel:
    """The model before training; None: the trained one without its adapter."""

    load: Callable[[], nn.Module] | None
    model: nn.Module | None = None

    def prepare(self) -> nn.Module | None:
        """Load it, if that was not done."""
        if self.load is not None and self.model is None:
            self.model = self.load().eval().requires_grad_(False)
        return self.model

    def on(self, device: torch.device) -> nn.Module | None:
        """The frozen model on `device`."""
        model = self.prepare()
        return None if model is None else model.to(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairObjective:
    """`Objective` of pairs under a language model (`dpo`) or a model of rewards (`reward`)."""

    head: ModelHead
    config: PreferenceConfig
    reference: ReferenceModel = field(default_factory=lambda: ReferenceModel(None))

    @property
    def gives_rewards(self) -> bool:
        """Whether the head says a number of each answer."""
        return self.head.kind.name == "sequence_classification"

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Pairs, and tokens of the chosen answers where their own loss is asked for."""
        if self.gives_rewards or not self.config.own_loss_weight:
            return {TERM: batch.num_samples}
        return {TERM: batch.num_samples, NLL: sum(part[1] for part in parts_of(batch))}

    def way(self, model: nn.Module, batch: MicroBatch) -> RowWay:
        """How the rows of this micro-batch are laid out."""
        if batch.segments.layout == "padded":
            return RowWay("padded", "the padded layout has one answer a row")
        found = row_way(self.head, model, longest=longest_path(batch))
        return RowWay("copied") if found.way == "shared" and not self.config.share_prompts else found

    @contextmanager
    def hold(self, model: nn.Module, batch: MicroBatch) -> Iterator[None]:
        """Attention that keeps these rows apart, through backward, where checkpointed layers run again."""
        if not batch.num_samples or batch.segments.layout == "padded":
            yield
            return
        plain = packing_plan_of(packed_part(self.head, model)).is_plain
        again = getattr(model, "is_gradient_checkpointing", False) and not plain
        rows = pair_rows(batch, self.way(model, batch).way)[0].segments if again else None
        inside = packed_rows(rows) if rows is not None else nullcontext()
        with kept_open(packed_attention_on(self.head, model, "packed")), inside:
            yield

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """The losses of these pairs, summed."""
        if not batch.num_samples:
            zero = next(model.parameters()).sum() * 0.0
            return dict.fromkeys(self.counts(batch), zero)
        if self.gives_rewards:
            return {TERM: self._reward_losses(self.rewards(model, batch)).sum()}
        values = self.values(model, batch)
        found = {TERM: pair_losses(values, self.config).sum()}
        if NLL in self.counts(batch):
            found[NLL] = -self.config.own_loss_weight * values.log_probs[:, 0].sum()
        return found

    def values(self, model: nn.Module, batch: MicroBatch) -> PairValues:
        """What the model and its reference say of each pair."""
        way = self.way(model, batch)
        log_probs = self._log_probs(model, batch, way)
        tokens = torch.tensor([part[1:] for part in parts_of(batch)], dtype=log_probs.dtype).to(log_probs.device)
        if not self.config.has_reference:
            return PairValues(log_probs, torch.zeros_like(log_probs), tokens)
        known_before = self._known_before(batch)
        if known_before is not None:
            return PairValues(log_probs, known_before.to(log_probs), tokens)
        other = self.reference.on(log_probs.device)
        with torch.no_grad(), without_adapters(model) if other is None else nullcontext():
            known = other if other is not None else model
            return PairValues(log_probs, self._log_probs(known, batch, way), tokens)

    def log_probs(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """[N, 2] what a language model says of both answers of each pair."""
        return self._log_probs(model, batch, self.way(model, batch))

    def _known_before(self, batch: MicroBatch) -> Tensor | None:
        """What the reference said before training; None where it was not asked, or not yet of these pairs."""
        found = batch.fields.get(REFERENCE)
        return found if found is not None and bool(found.isfinite().all()) else None

    def rewards(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """[N, 2] what a model of rewards says of each pair."""
        rows = pair_rows(batch, self.way(model, batch).way)
        found = torch.cat([read_rewards(self.head, model, one)[:, 0] for one in rows])
        return found.to(torch.promote_types(found.dtype, torch.float32)).view(-1, 2)

    def implied_rewards(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """[N, 2] rewards, or beta times how much more likely the answers have become."""
        return (
            self.rewards(model, batch) if self.gives_rewards else self.config.beta * self.values(model, batch).rewards
        )

    def _log_probs(self, model: nn.Module, batch: MicroBatch, way: RowWay) -> Tensor:
        sums: list[Tensor] = []
        for rows in pair_rows(batch, way.way):
            found = read_tokens(self.head, model, rows).log_probs
            sums += [part.sum() for part in torch.split(found, list(rows.counts))]
        return torch.stack(sums).view(-1, 2)

    def _reward_losses(self, rewards: Tensor) -> Tensor:
        chosen, rejected = rewards.unbind(1)
        return -logsigmoid(chosen - rejected) + self.config.center_rewards * (chosen + rejected).square()
