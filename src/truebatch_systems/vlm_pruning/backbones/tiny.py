"""Tiny backbones with random weights, and a tokenizer built in memory: nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest
from truebatch.testing.tiny_hf.model import randomize_zero_init
from truebatch_systems.vlm_pruning.config import TINY

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SPECIAL = (
    "<pad>", "<s>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>", "<video>",
)  # fmt: skip
"""Ids 0 to 8 of the tiny tokenizer."""
WORDS = (
    "How", "how", "many", "What", "what", "Which", "which", "Where", "where", "Is", "Are", "is", "are", "the", "there",
    "a", "an", "of", "in", "on", "to", "at", "and", "or", "left", "right", "above", "below", "top", "bottom", "corner",
    "middle", "center", "color", "colour", "shape", "shapes", "object", "objects", "image", "picture", "red", "green",
    "blue", "yellow", "purple", "orange", "white", "black", "grey", "circle", "circles", "square", "squares",
    "triangle", "triangles", "star", "cross", "large", "small", "yes", "no", "zero", "one", "two", "three", "four",
    "five", "six", "seven", "eight", "nine", "Answer", "with", "word", "single", "USER", "ASSISTANT", "user",
    "assistant", "half", "than", "more", "side",
)  # fmt: skip
"""Words with a token of their own; everything else is bytes."""
PAD, BOS, EOS, IMAGE = range(4)


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer that knows `WORDS`, as transformers wraps it."""
    vocab = {token: at for at, token in enumerate(SPECIAL)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    merges: dict[tuple[str, str], None] = {}
    for word in [start + word for start in ("\u0120", "") for word in WORDS]:
        for at in range(1, len(word)):
            merges[(word[:at], word[at])] = None
            vocab.setdefault(word[: at + 1], len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIAL[PAD], bos_token=SPECIAL[BOS], eos_token=SPECIAL[EOS],
        extra_special_tokens=list(SPECIAL[3:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip


def tiny_config(name: str) -> Any:
    """The configuration of a tiny backbone; LLaVA has 16 vision tokens an image and six decoder layers."""
    if name not in _CONFIGS:
        raise ConfigError(
            f"there is no tiny backbone of this name{nearest(name, list(TINY))}", seen=repr(name), do=f"one of {TINY}"
        )
    return _CONFIGS[name]()


def tiny_model(name: str, *, seed: int = 0, config: PretrainedConfig | None = None) -> nn.Module:
    """A tiny backbone in evaluation mode with weights in which context matters; the same seed gives the same weights."""
    chosen = tiny_config(name) if config is None else config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, _CLASSES[name])(chosen)
        randomize_zero_init(model)
    return model.float().eval()


def _text(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "max_position_embeddings": 512}
    return {**sizes, "num_key_value_heads": 2, "vocab_size": len(tiny_tokenizer()), **ids, **more}


def _clip() -> Any:
    return transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=56, patch_size=14
    )


def _llava() -> Any:
    return transformers.LlavaConfig(
        vision_config=_clip(), text_config=transformers.LlamaConfig(**_text()), image_token_index=IMAGE,
        vision_feature_layer=-2, vision_feature_select_strategy="default",
    )  # fmt: skip


def _llava_next() -> Any:
    return transformers.LlavaNextConfig(
        vision_config=_clip(), text_config=transformers.LlamaConfig(**_text()), image_token_index=IMAGE,
        vision_feature_layer=-2, image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
    )  # fmt: skip


def _qwen(kind: Any, vision: dict[str, Any], text: dict[str, Any]) -> Any:
    sizes = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 14}
    return kind(
        vision_config={**sizes, "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        text_config=_text(**text), image_token_id=IMAGE, video_token_id=8, vision_start_token_id=4,
        vision_end_token_id=5,
    )  # fmt: skip


def _qwen25() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return _qwen(
        transformers.Qwen2_5_VLConfig,
        {"window_size": 56, "fullatt_block_indexes": [1]},
        {"rope_parameters": rope},
    )


def _qwen3() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return _qwen(
        transformers.Qwen3VLConfig,
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"rope_parameters": rope, "head_dim": 16},
    )


_CONFIGS = dict(zip(TINY, (_llava, _llava_next, _qwen25, _qwen3), strict=True))
_CLASSES = dict(
    zip(
        TINY,
        (
            "LlavaForConditionalGeneration",
            "LlavaNextForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
        ),
        strict=True,
    )
)
