"""Decoder layers called directly, the way `StitchedForCausalLM` does not: every mask is made and checked here.

For code that must run layers itself, and as the slow reference of the stitched model. A decoder layer builds no mask
and owns no rotary table; both come from the donor it was taken from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from truebatch.attention.causal_mask import require_4d_mask


def run_layers(base: Any, hidden: Tensor, *, masks: dict[str, Tensor | None], position_ids: Tensor) -> Tensor:
    """[B, L, D] through all layers of a cut donor; `masks` are those of `layer_masks`, one for each kind of layer.

    A mask that is not [B, 1, Lq, Lk] raises `AttentionError`: a decoder layer would broadcast a 2-D one against
    [B, H, L, L] from the right and read it as [Lq, Lk].
    """
    kinds = _kinds(base)
    for mask in masks.values():
        require_4d_mask(mask, rows=hidden.shape[0], query_length=hidden.shape[1])
    for layer, kind in zip(base.layers, kinds, strict=True):
        rotary = _rotary(base, hidden, position_ids, kind)
        out = layer(hidden, attention_mask=masks[kind], position_embeddings=rotary, position_ids=position_ids)
        hidden = out[0] if isinstance(out, tuple) else out
    return hidden


def layer_masks(base: Any, hidden: Tensor, is_real: Tensor, position_ids: Tensor) -> dict[str, Tensor | None]:
    """The 4-D mask of every kind of layer a donor has, from the tokenizer's 2-D one; None: plainly causal."""
    given = {
        "config": base.config, "inputs_embeds": hidden, "attention_mask": is_real,
        "past_key_values": None, "position_ids": position_ids,
    }  # fmt: skip
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {kind: makers[kind](**given) for kind in sorted(set(_kinds(base)))}


def _kinds(base: Any) -> list[str]:
    kinds = getattr(base.config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    is_sliding = getattr(base.config, "sliding_window", None) is not None
    return ["sliding_attention" if is_sliding else "full_attention"] * len(base.layers)


def _rotary(base: Any, hidden: Tensor, position_ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    is_by_kind = isinstance(next(iter((base.config.rope_parameters or {"": None}).values())), dict)
    extra = {"layer_type": kind} if is_by_kind else {}
    found: tuple[Tensor, Tensor] = base.rotary_emb(hidden, position_ids=position_ids, **extra)
    return found


@torch.no_grad()
def causality_violation(call: Any, ids: Tensor, at: int) -> float:
    """How much the outputs [B, L, ...] of `call(ids)` before cell `at` change when the token there does; 0 if causal."""
    changed = ids.clone()
    changed[:, at] = (changed[:, at] + 1) % (int(ids.max()) + 1)
    return float((call(changed)[:, :at].float() - call(ids)[:, :at].float()).abs().max())
