"""Tiny donors with random weights in which context matters, and rows of made-up ids."""

from __future__ import annotations

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 4}),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM, {"sliding_window": 4}),
}
FAMILIES = tuple(_CLASSES)


def donor(family="llama", *, width=64, layers=4, heads=4, keys=2, seed=0, attention="sdpa", theta=10000.0, **more):
    """A model of a family; weights are widened so that context moves the logits."""
    config_class, model_class, own = _CLASSES[family]
    rope = {} if family == "gemma3_text" else {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, head_dim=width // heads, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, attn_implementation=attention, **rope, **{**own, **more},
    )  # fmt: skip
    if family == "gemma2":
        config._attn_implementation = "eager"  # it has a softcap that sdpa does not know
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, 0.5 if "embed" in name else weight.shape[1] ** -0.5)
    return model.eval()


def llama(**given):
    return donor("llama", **given)


def qwen2(**given):
    return donor("qwen2", **{"width": 96, "layers": 5, "heads": 6, "keys": 3, "seed": 1, "theta": 1e6, **given})


def make_ids(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in lengths]


def pad(samples, *, left=False, fill=0):
    """[B, L] ids and the tokenizer's mask."""
    width = max(len(s) for s in samples)
    ids = torch.full((len(samples), width), fill)
    is_real = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        place = slice(width - len(sample), width) if left else slice(0, len(sample))
        ids[row, place], is_real[row, place] = sample, 1
    return ids, is_real
