"""The loss: the next token of every cell that has one to learn, summed, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

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
        """Summed over the micro-batch, never averaged."""
        return {TERM: model(batch["input_ids"], batch.positions, batch.segments, labels=batch["labels"])}
