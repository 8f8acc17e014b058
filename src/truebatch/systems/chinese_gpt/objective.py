"""The loss: the next token of every cell that has one to learn, summed, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from truebatch.systems.chinese_gpt.model import has_values
from truebatch.tensors.chunkedloss import IGNORE
from truebatch.tensors.microbatch import MicroBatch

TERM = "nll"


@dataclass(frozen=True, slots=True)
class NextToken:
    """Negative log likelihood of the next token."""

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Tokens to learn."""
        return {TERM: int((batch["labels"] != IGNORE).sum())}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """Summed over the micro-batch, never averaged. Nothing to learn gives no gradient at all, not one of zeros:

        zeros would still move weights by the momentum of an optimiser.
        """
        if self._is_empty(batch):
            return {TERM: torch.zeros((), device=batch["labels"].device)}
        return {TERM: model(batch["input_ids"], batch.positions, batch.segments, labels=batch["labels"])}

    def _is_empty(self, batch: MicroBatch) -> bool:
        """From the plan where it knows: a card is not waited for."""
        has_label = batch["labels"] != IGNORE
        if TERM in batch.counts or has_label.device.type != "cpu" or not has_values(has_label):
            return batch.counts.get(TERM) == 0
        return not bool(has_label.any())
