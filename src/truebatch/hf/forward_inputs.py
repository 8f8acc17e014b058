"""The forward signature of a Hugging Face model, and its keyword arguments for the rows of a micro-batch.

MicroBatch -> route (alone | padded | packed | block) -> attention_mask, position_ids, segment table
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from threading import RLock
from typing import Any, Literal

import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch, RowAxis
from truebatch.batch.torch_compile import has_compiled_layers
from truebatch.errors import BatchError
from truebatch.hf.argument_names import accepted_names
from truebatch.hf.attention.block_mask import block_mask_inputs
from truebatch.hf.attention.forward_context import is_packing
from truebatch.hf.attention.packed import packed_inputs
from truebatch.hf.attention.rope import begin_call
from truebatch.hf.mixers.row_calls import TARGET_TABLE
from truebatch.hf.mixers.trial_rows import first_position

ONE_AT_A_TIME = RLock()
"""Held while a model is called: attention, masks and kernels are chosen for the process, and judges may run in
threads."""

Route = Literal["alone", "padded", "packed", "block"]
"""alone: one sample, called with what a tokenizer gives, the reference. padded: an attention mask and positions.
packed: our registered attention. block: a dense mask that keeps packed samples apart."""

TARGETS = "targets"
"""The axis of the decoder in an encoder-decoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardSignature:
    """What the forward of one model takes."""

    accepts: frozenset[str]
    """Names of its arguments."""
    first_position: int
    """The position of a sample's first token; RoBERTa and its kin count from `padding_idx + 1`."""
    has_grid_positions: bool
    """True where positions are three numbers a cell (time, height, width) that the model derives from its images."""


def inspect_forward(model: nn.Module) -> ForwardSignature:
    """Look at the signature of `forward` and at the table of positions."""
    accepts = accepted_names(model)
    return ForwardSignature(
        accepts=accepts,
        first_position=first_position(model),
        has_grid_positions=hasattr(inner_model(model), "get_rope_index") and "position_ids" in accepts,
    )


def inner_model(model: nn.Module) -> nn.Module:
    """The model under the head: what gives hidden states; the model itself where there is none."""
    prefix = getattr(model, "base_model_prefix", "") or "model"
    found = getattr(model, prefix, None)
    return found if isinstance(found, nn.Module) else model


def language_model(model: nn.Module) -> nn.Module:
    """The part that attends over text cells: of a vision-language model its language model, else the model."""
    for part in (inner_model(model), model):
        for name in ("language_model", "text_model"):
            found = getattr(part, name, None)
            if isinstance(found, nn.Module) and "pixel_values" in inspect.signature(model.forward).parameters:
                return found
    return model


def row_inputs(model: nn.Module, border: ForwardSignature, batch: MicroBatch, route: Route) -> dict[str, Any]:
    """Arguments that say where samples lie: nothing, a mask of real cells with positions, or a segment table.

    What the model does not take is left out; a model without `position_ids` counts positions itself.
    """
    axis = batch.rows()
    check_route(batch, route)
    begin_call(model, axis.segments.sample_lengths)
    out: dict[str, Any] = {"use_cache": False}
    if route in ("alone", "padded"):
        # Tokenizers give a mask with every sample, and some models read a missing one as a sign of packed rows.
        out["attention_mask"] = axis.is_real.long()
    if route == "padded":
        out["position_ids"] = axis.positions + border.first_position
    elif route == "packed":
        _refuse_own_positions(model, border)
        bounds = axis.segments.bounds_tensor if has_compiled_layers(model) else None
        out |= packed_inputs(axis.segments, positions=axis.positions, bounds=bounds)
    elif route == "block":
        out |= block_mask_inputs(language_model(model), axis.segments)
    if route in ("packed", "block"):
        if border.first_position:
            out["position_ids"] = out["position_ids"] + border.first_position
        out |= _segment_types(model, axis)
    if border.has_grid_positions:
        out.pop("position_ids", None)  # derived from the images, see `images.py`
    passed_on = {*_TABLE, *(("use_cache",) if "kwargs" in border.accepts else ())}
    return {name: value for name, value in out.items() if name in border.accepts or name in passed_on}


_TABLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def target_inputs(border: ForwardSignature, axis: RowAxis, route: Route) -> dict[str, Any]:
    """The same for the decoder of an encoder-decoder."""
    if route == "alone":
        return {}
    out: dict[str, Any] = {"decoder_position_ids": axis.positions}
    if route == "padded":
        out["decoder_attention_mask"] = axis.is_real.long()
    found = {name: value for name, value in out.items() if name in border.accepts}
    return {**found, TARGET_TABLE: axis.segments} if route == "packed" else found


def check_route(batch: MicroBatch, route: Route) -> None:
    """Refuse a route that does not say how these rows are to be read."""
    layout = batch.segments.layout
    if (layout == "packed") != (route in ("packed", "block")) and batch.num_samples > 1:
        raise BatchError(
            f"the route {route!r} does not fit {layout} rows",
            seen=f"{batch.num_samples} samples in {batch.segments.shape[0]} rows",
            do="use 'packed' or 'block' for packed rows and 'padded' for padded ones",
        )
    if route == "alone" and (batch.num_samples > 1 or not all(batch.segments.is_sample)):
        raise BatchError(
            "the route 'alone' is for one sample without padding",
            seen=f"{batch.num_samples} samples in rows of {batch.segments.shape[1]} cells",
            do="collate the samples one by one, or use the route 'padded'",
        )


def _refuse_own_positions(model: nn.Module, border: ForwardSignature) -> None:
    is_proven = is_packing(model) or is_packing(inner_model(model)) or is_packing(language_model(model))
    if "position_ids" not in border.accepts and not is_proven:
        raise BatchError(
            "this model counts positions from the start of a row, so packed samples would not begin at 0",
            seen=f"{type(model).__name__} takes no position_ids",
            do="plan the padded layout with right padding",
        )


def _segment_types(model: nn.Module, axis: RowAxis) -> dict[str, Tensor]:
    # A row may be longer than the buffer of zeros that BERT and its kin take their default from.
    if not getattr(getattr(model, "config", None), "type_vocab_size", 0):
        return {}
    return {"token_type_ids": torch.zeros_like(axis.positions)}
