"""The loss of a Hugging Face head as an objective: exact however a step is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from truebatch.hf.heads import Head
from truebatch.hf.inputs import Route
from truebatch.tensors.microbatch import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadObjective:
    """`Objective` of a model with a known head, with per-sample outputs beside the loss."""

    head: Head
    packed_rows: Literal["packed", "block"] = "packed"
    """How packed rows are read: by our registered attention, or under a dense mask."""
    plain_alone: bool = False
    """A micro-batch of one sample without padding is called with what a tokenizer gives: the reference."""

    def route(self, batch: MicroBatch) -> Route:
        """How the rows of this micro-batch are handed to the model."""
        if self.plain_alone and batch.num_samples == 1 and bool(batch.is_real.all()):
            return "alone"
        return self.packed_rows if batch.segments.layout == "packed" else "padded"

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """What the loss is divided by: labels, or what else the head counts."""
        return {self.head.loss.term: self.head.loss.count(batch)}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """The loss summed over this micro-batch, from logits; the model's own loss is never asked for.

        A micro-batch without samples (a rank with nothing to do) sums to 0, and its gradient is 0.
        """
        if not batch.num_samples:
            return {self.head.loss.term: next(model.parameters()).sum() * 0.0}
        outputs = self.head.run(model, batch, self.route(batch))
        return {self.head.loss.term: self.head.loss.total(outputs, batch)}

    def outputs_and_sums(
        self, model: nn.Module, batch: MicroBatch
    ) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """Both from one forward pass, for `verify`."""
        outputs = self.head.run(model, batch, self.route(batch))
        return self.head.per_sample(outputs, batch), {self.head.loss.term: self.head.loss.total(outputs, batch)}

    def outputs(self, model: nn.Module, batch: MicroBatch) -> dict[str, list[Tensor]]:
        """What the model says of every sample's real cells, in the order of `batch.sample_ids`."""
        return self.head.per_sample(self.head.run(model, batch, self.route(batch)), batch)
