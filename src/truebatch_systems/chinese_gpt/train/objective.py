"""The loss: the next token of every cell that has one to learn, summed, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from truebatch.batch.chunked_cross_entropy import IGNORE
from truebatch.batch.microbatch import MicroBatch

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
        learned = batch.filled_cells("labels", blank=IGNORE)
        if self._is_empty(batch, learned):
            return {TERM: torch.zeros((), device=batch["labels"].device)}
        given = (batch["input_ids"], batch.positions, batch.segments)
        return {TERM: model(*given, labels=batch["labels"], learned=learned)}

    def _is_empty(self, batch: MicroBatch, learned: Tensor | None) -> bool:
        """From what the host knows: avoids a host-device sync."""
        if learned is not None:
            return not len(learned)
        has_label = batch["labels"] != IGNORE
        is_here = has_label.device.type == "cpu" and type(has_label) is Tensor  # shapes alone have no values
        if TERM in batch.counts or not is_here:
            return batch.counts.get(TERM) == 0
        return not bool(has_label.any())
