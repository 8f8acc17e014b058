"""Losses as sums, from logits in fp32 or better: never a model's own, which averages over whatever it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from truebatch.batch.chunked_cross_entropy import IGNORE, chunked_nll
from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.heads.lm_head import OutputLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["IGNORE", "LOSSES", "Loss", "Outputs", "loss_of_classifier", "token_nll_in_chunks"]

Outputs = Mapping[str, Tensor]
"""Name -> what the model gave along the axis of its head."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One term of a loss: its sum over a micro-batch, and what it is divided by once per step."""

    term: str
    total: Callable[[Outputs, MicroBatch], Tensor]
    count: Callable[[MicroBatch], int]


def _wide(values: Tensor) -> Tensor:
    """At least fp32: half precision is too coarse to be summed in."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _token_nll(outputs: Outputs, batch: MicroBatch) -> Tensor:
    logits, labels = outputs["logits"], batch["labels"]
    return functional.cross_entropy(
        _wide(logits.flatten(0, -2)), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def token_nll_in_chunks(
    layer: OutputLayer, hidden: Tensor, labels: Tensor, *, cells: Tensor | None = None, compiled: bool = False
) -> Tensor:
    """The same sum as the loss `token_nll`, from what goes into the output layer; the logits are never all in memory.

    `cells`: the flattened ones with a label, where they are known; no logits are made of the others.
    """
    linear = layer.linear
    return chunked_nll(
        hidden.flatten(0, -2), linear.weight, labels.flatten(), cells=cells, bias=linear.bias, rule=layer.rule,
        compiled=compiled,
    )  # fmt: skip


def _num_labels(batch: MicroBatch) -> int:
    return int((batch["labels"] != IGNORE).sum())


def _sample_nll(outputs: Outputs, batch: MicroBatch) -> Tensor:
    return functional.cross_entropy(_wide(outputs["logits"]), batch["labels"], ignore_index=IGNORE, reduction="sum")


def _squared_error(outputs: Outputs, batch: MicroBatch) -> Tensor:
    logits = _wide(outputs["logits"])
    return (logits - batch["labels"].view_as(logits)).square().sum()


def _each_label(outputs: Outputs, batch: MicroBatch) -> Tensor:
    logits = _wide(outputs["logits"])
    return functional.binary_cross_entropy_with_logits(logits, batch["labels"].to(logits.dtype), reduction="sum")


def _span_nll(outputs: Outputs, batch: MicroBatch) -> Tensor:
    """The softmax runs over the cells of the sample alone: padding is no possible answer."""
    totals = [outputs["logits"].sum() * 0.0]
    for logits, *ends in zip(
        batch.per_sample(outputs["logits"]), batch["start_positions"], batch["end_positions"], strict=True
    ):
        totals += [functional.cross_entropy(_wide(logits[:, i]), end) for i, end in enumerate(ends)]
    return torch.stack(totals).sum()


def _half_square(outputs: Outputs, batch: MicroBatch) -> Tensor:
    """A base model has no loss of its own; this one has a gradient that every real cell takes part in."""
    hidden = batch.rows().take_tokens(outputs["last_hidden_state"])
    return 0.5 * _wide(hidden).square().sum()


LOSSES: Mapping[str, Loss] = {
    "token_nll": Loss("nll", _token_nll, _num_labels),
    "sample_nll": Loss("nll", _sample_nll, _num_labels),
    "squared_error": Loss("squared_error", _squared_error, lambda batch: int(batch["labels"].numel())),
    "each_label": Loss("nll", _each_label, lambda batch: int(batch["labels"].numel())),
    "span_nll": Loss("nll", _span_nll, lambda batch: 2 * batch.num_samples),
    "half_square": Loss("half_square", _half_square, lambda batch: sum(batch.rows().lengths)),
}


def loss_of_classifier(config: PretrainedConfig) -> str:
    """Which loss a sequence classifier has, decided as transformers does it where the labels do not say."""
    named = {
        "regression": "squared_error",
        "single_label_classification": "sample_nll",
        "multi_label_classification": "each_label",
    }
    problem = getattr(config, "problem_type", None)
    return named[problem] if problem else ("squared_error" if config.num_labels == 1 else "sample_nll")
