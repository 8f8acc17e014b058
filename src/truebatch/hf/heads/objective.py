"""The loss of a Hugging Face head as an objective: exact however a step is cut."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.torch_compile import force_eager, has_compiled_layers
from truebatch.errors import TruebatchError
from truebatch.hf.forward_inputs import Route
from truebatch.hf.heads.heads import ModelHead, packed_part, packed_rows_held, settle_packing
from truebatch.hf.heads.lm_head import OutputLayer, hidden_states_of, output_layer_of
from truebatch.hf.heads.losses import IGNORE, token_nll_in_chunks
from truebatch.hf.image_fields import image_token_id
from truebatch.training.data import TrainData, single_sample_batch_fn

_WITH_VOCABULARY = ("causal_lm", "masked_lm", "vision_language", "seq2seq")
"""Heads whose logits are wide enough to be worth cutting."""
_tried: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadObjective:
    """`Objective` of a model with a known head, with per-sample outputs beside the loss.

    >>> from truebatch.hf.heads.heads import head_of
    >>> from truebatch.hf.heads.objective import HeadObjective
    >>> from truebatch.testing.tiny_hf.model import tiny_model
    >>> HeadObjective(head=head_of(tiny_model("llama"))).head.kind.name
    'causal_lm'
    """

    head: ModelHead
    packed_rows: Literal["packed", "block"] = "packed"
    """How packed rows are read: by our registered attention, or under a dense mask."""
    plain_alone: bool = False
    """A micro-batch of one sample without padding is called with what a tokenizer gives: the reference."""
    in_chunks: bool = True
    """Language models: the loss from hidden states, a chunk of cells at a time, wherever that is the same."""

    def route(self, batch: MicroBatch) -> Route:
        """How the rows of this micro-batch are handed to the model."""
        if self.plain_alone and batch.num_samples == 1 and all(batch.segments.is_sample):
            return "alone"
        return self.packed_rows if batch.segments.layout == "packed" else "padded"

    def look_into(self, model: nn.Module, sample: Mapping[str, Any]) -> None:
        """Find out, on one sample, what is known of a model only by running it: before its parameters are sharded, for
        ranks that ran it at different times would wait for each other for ever."""
        with suppress(TruebatchError):  # no packed rows for this model; a run in packed rows says so
            settle_packing(self.head, model, "packed")
        data = TrainData(samples=[sample], fields=self.head.fields)
        self._output_layer(model, single_sample_batch_fn(data, epoch=0)(0))

    def hold(self, model: nn.Module, batch: MicroBatch) -> AbstractContextManager[None]:
        """Packed attention kept on through backward, where gradient checkpointing runs layers again."""
        return packed_rows_held(self.head, model, batch, self.route(batch))

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """What the loss is divided by: labels, or what else the head counts."""
        return {self.head.loss.term: self.head.loss.count(batch)}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """The loss summed over this micro-batch; the model's own loss is never asked for.

        A micro-batch without samples (a rank with nothing to do) sums to 0, and its gradient is 0.
        """
        if not batch.num_samples:
            return {self.head.loss.term: next(model.parameters()).sum() * 0.0}
        settle_packing(self.head, model, self.route(batch))
        self._try_as_written(model, batch)
        layer = self._output_layer(model, batch)
        if layer is not None:
            return {self.head.loss.term: self._sum_in_chunks(model, layer, batch)}
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

    def _try_as_written(self, model: nn.Module, batch: MicroBatch) -> None:
        """Once for a model with compiled layers: packed attention refuses what it must where it can look around."""
        if model in _tried or self.route(batch) != "packed" or not has_compiled_layers(model):
            return
        with force_eager(), torch.no_grad():
            self.head.run(model, batch, "packed")
        _tried.add(model)

    def _output_layer(self, model: nn.Module, batch: MicroBatch) -> OutputLayer | None:
        if not self.in_chunks or self.head.kind.name not in _WITH_VOCABULARY:
            return None
        image = None if self.head.images is None else image_token_id(model)
        return output_layer_of(model, batch["input_ids"], image=image, targets=batch.fields.get("decoder_input_ids"))

    def _sum_in_chunks(self, model: nn.Module, layer: OutputLayer, batch: MicroBatch) -> Tensor:
        packed_part(
            self.head, model
        )  # asked of a model for the first time, it runs it: not where hidden states are kept
        with hidden_states_of(layer) as seen:
            self.head.run(model, batch, self.route(batch))
        (hidden,) = seen
        cells, compiled = batch.filled_cells("labels", blank=IGNORE), has_compiled_layers(model)
        return token_nll_in_chunks(layer, hidden, batch["labels"], cells=cells, compiled=compiled)
