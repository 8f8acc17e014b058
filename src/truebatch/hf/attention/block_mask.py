"""Packed rows for Hugging Face models by a dense 4-D mask: slower than a segment table, but most models read it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from truebatch.attention.api import may_attend
from truebatch.batch.segments import Segments, cell_positions
from truebatch.errors import AttentionError


def block_mask_inputs(model: PreTrainedModel, segments: Segments) -> dict[str, Any]:
    """Keyword arguments with a dense 4-D mask instead of a table, for models that ignore the attention interface.

    Costs the square of the row. Sliding layers get their window.
    """
    _refuse_own_positions(model)
    config = model.config.get_text_config()
    causal = bool(getattr(config, "is_decoder", False) or _looks_causal(model))
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    elif window is not None and not causal:
        window += 1  # a window that looks both ways does not count the query's own cell in transformers
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise AttentionError(
            "a block mask cannot keep samples apart in every layer of this model",
            seen=f"{type(model).__name__} with layers of kind {sorted(kinds)}",
            do="plan the padded layout for it",
        )
    masks = {
        kind: _for_model(model, may_attend(segments, causal=causal, window=window if "sliding" in kind else None))
        for kind in sorted(kinds)
    }
    return {
        "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
        "position_ids": cell_positions(segments),
    }


def _refuse_own_positions(model: PreTrainedModel) -> None:
    knows = "position_ids" in inspect.signature(model.forward).parameters
    if not knows or getattr(model.config, "alibi", False):
        raise AttentionError(
            "this model makes its positions from whole rows, so packed samples would not start at 0",
            seen=f"{type(model).__name__} with ALiBi" if knows else f"{type(model).__name__} takes no position_ids",
            do="plan the padded layout with right padding",
        )


def _looks_causal(model: PreTrainedModel) -> bool:
    """What the attention modules say; where they are silent, True unless the architecture fills in masked tokens."""
    flags = [bool(part.is_causal) for part in model.modules() if hasattr(part, "is_causal")]
    return all(flags) if flags else model.config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _for_model(model: PreTrainedModel, allowed: Tensor) -> Tensor:
    if model.config._attn_implementation != "eager":
        return allowed
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device).masked_fill(~allowed, lowest)
