"""Tiny random models of many architectures, and what packed runs of them are compared with."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCABULARY = 97
WINDOW = 4

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
GROUPED = {**COMMON, **NO_TOKENS, "num_key_value_heads": 2}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

CONFIGS = {
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {**GROUPED, "use_sliding_window": True, **MIXED}),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 8, "attn_logit_softcapping": 0.5, **MIXED}),
    "gemma3_text": ("Gemma3TextConfig", {**GROUPED, "head_dim": 8, **MIXED}),
    "phi3": ("Phi3Config", {**GROUPED, "sliding_window": WINDOW}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **NO_TOKENS},
    ),
    "gpt_neox": ("GPTNeoXConfig", {**COMMON, **NO_TOKENS}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **GROUPED,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **MIXED,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            **NO_TOKENS,
        },
    ),
    "bert": ("BertConfig", {**COMMON, **NO_TOKENS}),
    "modernbert": (
        "ModernBertConfig",
        {
            **COMMON,
            **NO_TOKENS,
            "cls_token_id": None,
            "sep_token_id": None,
            "local_attention": 6,
            "num_hidden_layers": 3,
            "global_attn_every_n_layers": 2,
        },
    ),
    "falcon": (
        "FalconConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **NO_TOKENS},
    ),
    "falcon_alibi": (
        "FalconConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
            **NO_TOKENS,
        },
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **NO_TOKENS},
    ),
    "mamba": ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, **NO_TOKENS}),
    "llama4": (
        "Llama4TextConfig",
        {**GROUPED, "head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
}
TABLE = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "opt",
    "bert",
    "modernbert",
]
"""Architectures that must run packed through the segment table."""


def build(name: str, *, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """A model whose weights are large enough that a wrong window, softcap or position shows."""
    torch.manual_seed(seed)
    kind, settings = CONFIGS[name]
    config = getattr(transformers, kind)(**settings)
    family = transformers.AutoModelForMaskedLM if "bert" in name else transformers.AutoModelForCausalLM
    model = family.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def draw_tokens(lengths: list[int], seed: int = 0) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=chance) for length in lengths]


def weigh(logits: Tensor) -> Tensor:
    """A sum over cells that is no symmetric function of the logits [cells, V]."""
    return (logits * torch.linspace(-1, 1, logits.shape[-1]).sin()).tanh().sum()


def alone(model: PreTrainedModel, samples: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [cells, V] and gradients, one sample a call."""
    model.zero_grad()
    outs = [model(input_ids=sample[None]).logits[0] for sample in samples]
    torch.stack([weigh(out) for out in outs]).sum().backward()
    return torch.cat(outs).detach(), gradients(model)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def assert_equal_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    largest = max(float(part.abs().max()) for part in want.values())
    assert got.keys() == want.keys()
    for name, part in want.items():
        assert float((got[name] - part).abs().max()) <= 1e-5 * largest, name
