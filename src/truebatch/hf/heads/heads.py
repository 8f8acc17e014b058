"""One table from a Hugging Face model to what its head needs: fields in, logits out, a loss as a sum and a count.

model -> head_of -> Head: prepare a sample, arguments for a route, read the outputs, sum and count the loss
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import SAMPLES, MicroBatch
from truebatch.errors import BatchError, ConfigError
from truebatch.hf.attention.forward_context import is_packing
from truebatch.hf.attention.packed import NAME, packed_rows, packed_whole, packing_plan_of, use_packed_attention
from truebatch.hf.attention.vision_tower import one_call_for_images
from truebatch.hf.forward_inputs import (
    TARGETS,
    ForwardSignature,
    Route,
    inner_model,
    inspect_forward,
    language_model,
    row_inputs,
    target_inputs,
)
from truebatch.hf.heads.losses import IGNORE, LOSSES, Loss, Outputs, loss_of_classifier
from truebatch.hf.heads.table import KINDS, OPTIONAL, HeadKind
from truebatch.hf.image_fields import (
    OPTIONAL_IMAGE_FIELDS,
    ImageStyle,
    flat_pixels,
    image_inputs,
    refuse_images,
    style_of,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelHead:
    """How one model is fed and read. Made by `head_of`."""

    kind: HeadKind
    border: ForwardSignature
    fields: tuple[Field, ...]
    loss: Loss
    images: ImageStyle | None = None
    pools_last: bool = False
    """True for classifiers that read the last token of a sample: done here, because models look for a pad id."""
    pad_id: int = 0
    """What a classifier that looks for padding finds in empty cells."""
    start_id: int = 0
    """What the decoder of an encoder-decoder begins with."""

    @property
    def reads_left_to_right(self) -> bool:
        """True where what is read of a token depends on no token behind it."""
        return self.kind.name == "causal_lm" or self.pools_last

    def prepare(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The sample with what its fields need, made before any padding: labels and the inputs of a decoder."""
        return _prepare(self, sample)

    def inputs(self, model: nn.Module, batch: MicroBatch, route: Route) -> dict[str, Any]:
        """Keyword arguments for `model`; `attention_mask` is 1 where a cell is real, as everywhere in transformers."""
        return _inputs(self, model, batch, route)

    def run(self, model: nn.Module, batch: MicroBatch, route: Route) -> dict[str, Tensor]:
        """Call the model; its outputs along the axis of the head, before they are taken apart."""
        with packed_attention_on(self, model, route):
            return _run(self, model, batch, route)

    def per_sample(self, outputs: Outputs, batch: MicroBatch) -> dict[str, list[Tensor]]:
        """The outputs of every sample's real cells, in the order of `batch.sample_ids`."""
        return {name: batch.per_sample(value, self.kind.axis) for name, value in outputs.items()}


def head_of(model: nn.Module, sample: Mapping[str, Any] | None = None) -> ModelHead:
    """The head of a Hugging Face model, found by its class; refused by name where the table has none.

    A `sample` may carry optional fields (`token_type_ids`), which the head then takes along.
    """
    kind, border = _kind_of(model), inspect_forward(model)
    config: PretrainedConfig = model.config
    _refuse_pooled_decoder(model, kind)
    images = style_of(model, border) if kind.name == "vision_language" else None
    if kind.name == "vision_language" and images is None:
        raise refuse_images(model, border)
    optional = [f for name, f in OPTIONAL.items() if sample is not None and name in sample and name in border.accepts]
    loss = loss_of_classifier(config) if kind.name == "sequence_classification" else kind.loss
    return ModelHead(
        kind=kind,
        border=border,
        fields=(*kind.fields, *(images.fields if images else ()), *_optional_of_images(images, sample), *optional),
        loss=LOSSES[loss],
        images=images,
        pools_last=kind.name == "sequence_classification" and isinstance(getattr(model, "score", None), nn.Module),
        pad_id=_id(config, "pad_token_id"),
        start_id=_start_id(config),
    )


def _optional_of_images(images: ImageStyle | None, sample: Mapping[str, Any] | None) -> tuple[Field, ...]:
    if images is None or sample is None:
        return ()
    return tuple(f for name, f in OPTIONAL_IMAGE_FIELDS.items() if name in sample)


@contextmanager
def packed_attention_on(head: ModelHead, model: nn.Module, route: Route) -> Iterator[None]:
    """While open, packed rows may go through the model, and all images of a micro-batch through its vision tower in one
    call. Keep it open around backward with gradient checkpointing."""
    part = packed_part(head, model)
    images = one_call_for_images(model) if head.images is not None and route == "packed" else nullcontext()
    is_on = part.config._attn_implementation == NAME
    is_ready = route != "packed" or is_packing(part) or (is_on and packing_plan_of(part).is_plain)
    with images, nullcontext() if is_ready else use_packed_attention(part):
        yield


def settle_packing(head: ModelHead, model: nn.Module, route: Route) -> None:
    """Find out how packed rows of this model are made right, if that is not known: its modules are called for it."""
    if route == "packed":
        packing_plan_of(packed_part(head, model))


def packed_part(head: ModelHead, model: nn.Module) -> Any:
    """The part of a model that reads packed rows: all of it, or its language model."""
    if head.pools_last:
        return inner_model(model)
    part: Any = language_model(model)
    return model if part is not model and packed_whole(cast(Any, model), part) else part


@contextmanager
def packed_rows_held(head: ModelHead, model: nn.Module, batch: MicroBatch, route: Route) -> Iterator[None]:
    """The same around forward and backward; layers that are run again there find the rows of this micro-batch."""
    part = packed_part(head, model)
    with packed_attention_on(head, model, route):
        if route != "packed" or packing_plan_of(part).is_plain or not _is_run_again(model, part):
            yield
            return
        targets = batch.rows(TARGETS).segments if head.kind.axis == TARGETS else None
        with packed_rows(batch.segments, targets):
            yield


def _is_run_again(model: nn.Module, part: nn.Module) -> bool:
    """Whether backward runs layers of this part once more; to ask a model is to look at all its modules."""
    return part in (model, inner_model(model)) and bool(getattr(model, "is_gradient_checkpointing", False))


def _kind_of(model: nn.Module) -> HeadKind:
    fitting = _fitting_kinds(model) if hasattr(model, "config") else []
    if len(fitting) > 1 and fitting[0].name == "vision_language" and style_of(model, inspect_forward(model)) is None:
        return fitting[1]  # its text alone
    if fitting:
        return fitting[0]
    raise ConfigError(
        f"{type(model).__name__} is not in the table of heads",
        seen=f"a model of {type(model).__module__}, transformers {transformers.__version__}",
        do=f"use a model with one of the heads {[kind.name for kind in KINDS]}, or write an Objective for it",
    )


def _fitting_kinds(model: nn.Module) -> list[HeadKind]:
    """The kinds a class is of, those that a table of transformers says first."""
    accepts = inspect_forward(model).accepts
    names = [cls.__name__ for cls in type(model).__mro__]
    usable = [kind for kind in KINDS if kind.needs <= accepts]
    listed = [kind for kind in usable if _is_named(names, kind, True)]
    return listed or [kind for kind in usable if _is_named(names, kind, False)]


def _is_named(names: list[str], kind: HeadKind, by_table: bool) -> bool:
    if not by_table:
        return bool(kind.endings) and any(name.endswith(kind.endings) for name in names)
    listed: set[str] = set()
    for table in kind.tables:
        for found in getattr(modeling_auto, table, {}).values():
            listed.update(found if isinstance(found, tuple | list) else [found])
    return any(name in listed for name in names)


def _refuse_pooled_decoder(model: nn.Module, kind: HeadKind) -> None:
    config: PretrainedConfig = model.config
    takes_targets = "decoder_input_ids" in inspect_forward(model).accepts
    if kind.axis != TARGETS and takes_targets and getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} makes the input of its decoder itself, from whole rows",
            seen=f"a head of kind {kind.name!r} on an encoder-decoder",
            do="use its encoder, its ...ForConditionalGeneration, or write an Objective for it",
        )


def _id(config: PretrainedConfig, *names: str) -> int:
    for part in (config, getattr(config, "decoder", None), config.get_text_config()):
        for name in names:
            found = getattr(part, name, None)
            if isinstance(found, int) and found >= 0:
                return found
    return 0


def _start_id(config: PretrainedConfig) -> int:
    return _id(config, "decoder_start_token_id", "bos_token_id", "pad_token_id")


def _prepare(head: ModelHead, sample: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(sample)
    if head.images is not None:
        out |= flat_pixels(head.images, sample)
    if head.kind.name in ("causal_lm", "vision_language", "masked_lm"):
        out.setdefault("labels", _given(sample, "input_ids", head))
    if head.kind.name == "seq2seq" and "decoder_input_ids" not in out:
        labels = torch.as_tensor(_given(sample, "labels", head))
        shown = labels.masked_fill(labels == IGNORE, head.pad_id)
        out["decoder_input_ids"] = torch.cat([shown.new_tensor([head.start_id]), shown[:-1]])
    for f in head.fields:
        _given(out, f.key, head)
    return out


def _given(sample: Mapping[str, Any], name: str, head: ModelHead) -> Any:
    if name not in sample:
        raise BatchError(
            f"a sample for a {head.kind.name} head needs {name!r}",
            seen=f"fields {sorted(sample)}",
            do=f"return {sorted({f.key for f in head.fields})} from the dataset",
        )
    return sample[name]


def _inputs(head: ModelHead, model: nn.Module, batch: MicroBatch, route: Route) -> dict[str, Any]:
    if head.kind.axis == TARGETS and route == "block":
        raise BatchError(
            "packed rows of an encoder and of a decoder need two tables",
            seen=f"{type(model).__name__} with packed rows under a mask",
            do="plan the padded layout for it",
        )
    out = {"input_ids": batch["input_ids"], **row_inputs(model, head.border, batch, route)}
    if head.kind.name == "sequence_classification":
        out["input_ids"] = batch["input_ids"].masked_fill(~batch.is_real, head.pad_id)
    if head.kind.axis == TARGETS:
        out |= {"decoder_input_ids": batch["decoder_input_ids"]}
        out |= target_inputs(head.border, batch.rows(TARGETS), route)
    if head.images is not None:
        out |= image_inputs(model, head.border, batch, head.images, route)
    out |= {name: batch[name] for name in OPTIONAL if name in batch.fields}
    return {name: _as_model_reads(model, value) for name, value in out.items()}


def _as_model_reads(model: nn.Module, value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(next(model.parameters()).dtype)
    return value


def _run(head: ModelHead, model: nn.Module, batch: MicroBatch, route: Route) -> dict[str, Tensor]:
    given = head.inputs(model, batch, route)
    if head.pools_last and route != "alone":
        return {"logits": _score_last(model, batch, given)}
    if head.kind.axis == SAMPLES and route in ("packed", "block"):
        raise BatchError(
            "this classifier reads a fixed cell of every row, so a packed row would give one answer for all its samples",
            seen=f"{type(model).__name__} with {batch.num_samples} samples in {batch.segments.shape[0]} rows",
            do="plan the padded layout for it",
        )
    output = model(**given)
    found = [getattr(output, name, None) for name in head.kind.outputs]
    if len(found) == 2:
        return {"logits": torch.stack([_tensor(f, model) for f in found], -1)}
    first = found[0] if found[0] is not None else output[0]
    return {head.kind.outputs[0]: _tensor(first, model)}


def _tensor(value: Any, model: nn.Module) -> Tensor:
    if not isinstance(value, Tensor):
        raise BatchError(
            f"{type(model).__name__} gave no tensor where its head has one",
            seen=f"{type(value).__name__}",
            do="write an Objective for it",
        )
    return value


def _score_last(model: Any, batch: MicroBatch, given: dict[str, Any]) -> Tensor:
    """[N, labels]: the classifier applied to the last token of every sample, at whatever cell."""
    hidden = inner_model(model)(**given)[0]
    last = torch.stack([cells[-1] for cells in batch.per_sample(hidden)])
    scores: Tensor = model.score(last)
    return scores
