"""A tiny Qwen3-VL with random weights and a processor made in memory: a judge to try things out with, no file needed."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from truebatch.hf.processors import images_only
from truebatch.testing.tiny_hf.model import randomize_zero_init

SPECIAL = (
    "<pad>", "<s>", "</s>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>",
    "<|im_start|>", "<|im_end|>",
)  # fmt: skip
"""Tokens 0 to 8; behind them come bytes."""
PAD, BOS, EOS, IMAGE, VISION_START, VISION_END, VIDEO = range(7)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 300
_PATCH = 16


def tiny_judge(*, seed: int = 0) -> tuple[nn.Module, Any]:
    """The model in fp32 and evaluation mode, and its processor; the same seed gives the same weights."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": _PATCH,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.Qwen3VLForConditionalGeneration(config)
        randomize_zero_init(model)
    return model.float().eval(), make_processor(VOCABULARY, most_pixels=128 * 128)


def make_processor(vocabulary: int, *, most_pixels: int) -> Any:
    """A Qwen3-VL processor without a file: bytes as tokens, further tokens up to the model's vocabulary."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer(vocabulary)
    sizes = {"shortest_edge": (2 * _PATCH) ** 2, "longest_edge": most_pixels}
    images = Qwen2VLImageProcessorPil(patch_size=_PATCH, merge_size=2, temporal_patch_size=2, size=sizes)
    kind = images_only(transformers.Qwen3VLProcessor)
    return kind(image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATE)


def make_tokenizer(vocabulary: int) -> Any:
    """Bytes as tokens; every further one has a name of its own, so that answers in them can be told apart."""
    vocab = {token: at for at, token in enumerate(SPECIAL)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    vocab |= {f"<{at}>": at for at in range(len(vocab), vocabulary)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    named = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=False))
    made: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, extra_special_tokens=list(SPECIAL[3:]), clean_up_tokenization_spaces=False, **named
    )
    made.image_token, made.image_token_id = "<|image_pad|>", IMAGE
    made.video_token, made.video_token_id = "<|video_pad|>", VIDEO
    made.vision_start_token, made.vision_start_token_id = "<|vision_start|>", VISION_START
    made.vision_end_token, made.vision_end_token_id = "<|vision_end|>", VISION_END
    made.chat_template = TEMPLATE
    return made
