"""Models by their sizes, with random weights: what speed is measured on, without downloading anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model by its sizes."""

    name: str
    config: str
    sizes: dict[str, int]
    """Settings of its configuration."""
    masked: bool = False
    """A masked language model that reads both ways."""


SHAPES = {
    "llama-1.1b": Shape(
        name="llama-1.1b", config="LlamaConfig",
        sizes={"num_hidden_layers": 22, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
               "intermediate_size": 5632, "vocab_size": 32000},
    ),
    "qwen2-0.5b": Shape(
        name="qwen2-0.5b", config="Qwen2Config",
        sizes={"num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
               "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "bert-110m": Shape(
        name="bert-110m", config="BertConfig", masked=True,
        sizes={"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
               "vocab_size": 30522},
    ),
    "llama-tiny": Shape(
        name="llama-tiny", config="LlamaConfig",
        sizes={"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 704, "vocab_size": 1024},
    ),
    "qwen2-tiny": Shape(
        name="qwen2-tiny", config="Qwen2Config",
        sizes={"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 352, "vocab_size": 1024},
    ),
    "qwen3.5-1b": Shape(
        name="qwen3.5-1b", config="Qwen3_5TextConfig",
        sizes={"num_hidden_layers": 24, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
               "head_dim": 128, "intermediate_size": 4608, "linear_num_key_heads": 12, "linear_num_value_heads": 12,
               "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 32000},
    ),
    "qwen3_next-tiny": Shape(
        name="qwen3_next-tiny", config="Qwen3NextConfig",
        sizes={"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
               "head_dim": 32, "intermediate_size": 352, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
               "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
               "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "vocab_size": 1024},
    ),
    "falcon_h1-tiny": Shape(
        name="falcon_h1-tiny", config="FalconH1Config",
        sizes={"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
               "head_dim": 32, "intermediate_size": 352, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32,
               "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 64, "vocab_size": 1024},
    ),
    "bert-tiny": Shape(
        name="bert-tiny", config="BertConfig", masked=True,
        sizes={"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512,
               "vocab_size": 1024},
    ),
}  # fmt: skip


def build_model(shape: Shape, *, longest: int, device: str, dtype: torch.dtype) -> Any:
    """A model of this shape with random weights, no dropout, and as many positions as the longest sample needs."""
    settings: dict[str, Any] = {**shape.sizes, **_NO_TOKENS, "max_position_embeddings": longest}
    if shape.masked:
        settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, shape.config)(**settings)
    family = transformers.AutoModelForMaskedLM if shape.masked else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = family.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return model.to(device).train()


def matrix_flops_per_token(model: nn.Module, *, labelled: float = 1.0) -> float:
    """Forward and backward of all matrix products but attention: 6 for every weight that is multiplied with.

    `labelled`: the share of the tokens that have a label; no others need the output layer.
    """
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    apart = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)} | {id(output.weight)}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in apart)
    words: int = output.weight.numel()
    return 6.0 * (weights + labelled * words)


def attention_flops_per_pair(shape: Shape) -> float:
    """Forward and backward of one query-key pair in all layers, half of the pairs of a causal sample counted."""
    share = 1.0 if shape.masked else 0.5
    return 12.0 * share * shape.sizes["num_hidden_layers"] * shape.sizes["hidden_size"]
