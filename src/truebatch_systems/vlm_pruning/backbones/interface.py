"""What the families of backbones have in common: what reads images, and what a vision tower says about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from truebatch.hf.forward_inputs import inner_model
from truebatch_systems.vlm_pruning.config import MllmSettings
from truebatch_systems.vlm_pruning.data.image_size import SizeRule, resize_image

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, eq=False)
class ImageReader:
    """What is needed to encode images, without weights."""

    config: PretrainedConfig
    """Of the backbone."""
    processor: Any
    """transformers' image processor, where the family uses it."""
    settings: MllmSettings

    def sized(self, images: Sequence[Image.Image], rule: SizeRule) -> list[Image.Image]:
        """Images as the settings size them."""
        return [resize_image(image, self.settings, rule) for image in images]


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """What the vision tower says about all images of a micro-batch, image after image."""

    features: Tensor
    """[n, width]: before the projector (LLaVA-1.5), else as the language model takes them."""
    lengths: tuple[int, ...]
    """Features of every image."""
    is_projected: bool
    deepstack: tuple[Tensor, ...] = ()
    """[n, d] each: what Qwen3-VL adds after its first layers."""


def ask_features(model: nn.Module, *, pixel_values: Tensor, **beside: Tensor) -> Vision:
    """Through transformers' own `get_image_features`: tower, projector and packing."""
    inner: Any = inner_model(model)
    weight = next(model.parameters())
    if not len(pixel_values):
        width = int(inner.config.get_text_config().hidden_size)
        return Vision(torch.zeros((0, width), device=weight.device, dtype=weight.dtype), (), True)
    found = inner.get_image_features(pixel_values.to(weight.dtype), **beside)
    parts = list(getattr(found, "pooler_output", found))
    levels = getattr(found, "deepstack_features", None) or ()  # whole, or image by image, as versions differ
    deep = [level if isinstance(level, Tensor) else torch.cat(list(level)) for level in levels]
    return Vision(torch.cat(parts), tuple(len(p) for p in parts), True, tuple(deep))
