"""The shape of LLaVA-1.5-7B with random weights, built where it will run: for measurements of speed and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from truebatch_systems.vlm_pruning.backbones.tiny import IMAGE

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def llava_7b() -> Any:
    """CLIP-L/14 at 336 pixels, 576 vision tokens, a decoder of 32 layers; the image token is that of the tiny tokenizer."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=336,
        patch_size=14, projection_dim=768,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=32064, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )  # fmt: skip


def random_llava(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> nn.Module:
    """A LLaVA of this configuration, drawn on the device itself."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            torch.manual_seed(seed)
            made: nn.Module = transformers.LlavaForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    return made


def clip_processor(side: int) -> Any:
    """transformers' own image processor of LLaVA-1.5, for comparison."""
    kind: Any = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    return kind(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
