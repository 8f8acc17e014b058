"""What pruning saves, counted from what really stands in each layer's cache: tokens, operations, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from truebatch.hf.forward_inputs import language_model
from truebatch_systems.vlm_pruning.eval.generate import PrunedSession
from truebatch_systems.vlm_pruning.model.decoder_layers import decoder_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Account:
    """Of some prompts, one by one."""

    vision_tokens: tuple[tuple[int, ...], ...]
    """A layer: the vision tokens of every row that stand in its cache."""
    text_tokens: tuple[int, ...]
    """Of every row."""
    flops: float
    """Multiplications and additions of the decoder over all prompts, without padding."""
    cache_bytes: int
    """Keys and values of all prompts, without padding."""

    @property
    def average_tokens(self) -> tuple[float, ...]:
        """Of every row: vision tokens an average layer sees."""
        layers = len(self.vision_tokens)
        return tuple(sum(layer[row] for layer in self.vision_tokens) / layers for row in range(len(self.text_tokens)))

    def figures(self) -> dict[str, Any]:
        """For a table or a JSON file; `vision_tokens_mean/max/min` are of what entered the first layer."""
        entered = self.vision_tokens[0]
        return {
            "vision_tokens_mean": sum(entered) / max(len(entered), 1),
            "vision_tokens_max": max(entered, default=0),
            "vision_tokens_min": min(entered, default=0),
            "hard_avg_tokens": sum(self.average_tokens) / max(len(entered), 1),
            "hard_avg_keep_ratio": sum(self.average_tokens) / max(sum(entered), 1),
            "hard_final_tokens": sum(self.vision_tokens[-1]) / max(len(entered), 1),
            "tokens_per_layer": [sum(layer) / max(len(layer), 1) for layer in self.vision_tokens],
            "flops": self.flops,
            "cache_bytes": self.cache_bytes,
        }


def account_of(session: PrunedSession, backbone: nn.Module, text_tokens: Sequence[int]) -> Account:
    """The account of prompts that have just been read, before the first new token."""
    tokens = tuple(tuple(int(n) for n in layer.tolist()) for layer in session.vision_tokens)
    lengths = [[v + t for v, t in zip(layer, text_tokens, strict=True)] for layer in tokens]
    config: PretrainedConfig = language_model(backbone).config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = _matrix_weights(decoder_layers(backbone)[0])
    flops = sum(
        2.0 * weights * n + 4.0 * config.num_attention_heads * width * n * (n + 1) / 2
        for layer in lengths
        for n in layer
    )
    size = torch.finfo(next(backbone.parameters()).dtype).bits // 8
    kept = sum(n for layer in lengths for n in layer) * 2 * config.num_key_value_heads * width * size
    return Account(tokens, tuple(text_tokens), flops, kept)


def _matrix_weights(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters() if p.ndim == 2)
