"""What packed attention does not serve: models and calls that it refuses by name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truebatch.errors import AttentionError
from truebatch.hf.attention.forward_context import ForwardContext


def needs_search(model: PreTrainedModel) -> bool:
    """Whether more than self-attention that takes its segment table may reach from cell to cell."""
    named = inspect.signature(type(model).forward).parameters
    return bool(
        _state_along_the_row(model)
        or getattr(model.config, "is_encoder_decoder", False)
        or "position_ids" not in named
        or not takes_attention(model)
    )


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether its attention can be another than the one it was written with."""
    asked = getattr(model, "_can_set_attn_implementation", None)
    return asked is None or bool(asked())


def refuse_model(model: PreTrainedModel) -> None:
    """Raise for a model in which more than self-attention reaches from cell to cell."""
    reason = _state_along_the_row(model)
    if reason:
        raise AttentionError(
            "this model carries a state along the row, past the end of a sample",
            seen=reason,
            do="open `use_packed_attention(model)` around its calls, or plan the padded layout with right padding",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise AttentionError(
            "packed rows of an encoder and of a decoder need two tables",
            seen=f"{type(model).__name__} is an encoder-decoder",
            do="open `use_packed_attention(model)` around its calls, or plan the padded layout with right padding",
        )


def _state_along_the_row(model: PreTrainedModel) -> str:
    """What else than attention reaches from cell to cell, in words; empty if nothing does."""
    name = type(model).__name__
    if any(getattr(part, "_is_stateful", False) for part in model.modules()):
        return f"{name} is stateful"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or []) & {"conv", "linear_attention"}
    if kinds:
        return f"{name} has layers of kind {sorted(kinds)}"
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv1d)]
    return f"{name} convolves along the row" if any(part.kernel_size[0] > 1 for part in convolutions) else ""


def refuse_call(module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None) -> None:
    """Raise for a call of attention with other keys than its queries, or with a mask."""
    if query.shape[2] != key.shape[2] or getattr(module, "is_cross_attention", False):
        raise AttentionError(
            "packed attention is self-attention without a cache",
            seen=f"{type(module).__name__} with {query.shape[2]} queries and {key.shape[2]} keys",
            do="generate and cross-attend with padded rows; in training pass use_cache=False",
        )
    if attention_mask is not None:
        raise AttentionError(
            "packed attention was given a mask beside its segment table",
            seen=f"{type(module).__name__} with a mask {list(attention_mask.shape)}",
            do="leave attention_mask out of a packed call; padding is a segment of its own",
        )


def refuse_unknown_window(module: nn.Module, run: ForwardContext | None, options: dict[str, Any]) -> None:
    """Raise where a model asked for a mask with a window and its attention is not told of one."""
    if run is None or not run.windows:
        return
    if "sliding_window" not in options and not hasattr(module, "sliding_window"):
        raise AttentionError(
            "this model has sliding-window layers that do not say so to their attention",
            seen=f"{type(module).__name__} gives no sliding_window, the model asked for windows {sorted(run.windows)}",
            do="call it with block_mask_inputs(model, segments), or plan the padded layout",
        )


def refuse_packed_outside(module: nn.Module, query: Tensor, attention_mask: Tensor | None, positions: Any) -> None:
    """Raise for packed rows in a call of attention that no call of its model surrounds, where nobody read its words."""
    is_unread = attention_mask is None and isinstance(positions, Tensor) and positions.ndim == 2
    if not is_unread or query.shape[2] == 1 or torch._C._current_graph_task_id() != -1:
        return  # inside backward, a layer runs again with the words that were read before
    if bool((positions.diff(dim=-1) <= 0).any()):
        raise AttentionError(
            "attention over packed rows was called without a segment table",
            seen=f"{type(module).__name__} with positions that begin again, outside the call of its model",
            do="call the model itself and not its forward(), and choose the attention with from_pretrained or "
            "set_attn_implementation",
        )
