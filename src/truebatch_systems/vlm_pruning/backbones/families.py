"""Four families of backbones behind one interface: how their images are encoded, and what their vision tower gives.

images of a sample -> arrays and vision tokens an image;  micro-batch -> one call of the tower -> vision features
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor, nn

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch_systems.vlm_pruning.backbones import llava, llava_next, qwen_vl
from truebatch_systems.vlm_pruning.backbones.interface import ImageReader, Vision
from truebatch_systems.vlm_pruning.data.image_size import SizeRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Encoded = tuple[dict[str, Any], list[int]]
"""Arrays of a sample's images, and the vision tokens of each."""


def num_merged(features: int, *, ratio: float) -> int:
    """How many features a merger leaves of an image."""
    return max(1, int(features * ratio))


def _merge_any(_reader: ImageReader, arrays: dict[str, Any], tokens: Sequence[int], ratio: float) -> Encoded:
    return arrays, [num_merged(n, ratio=ratio) for n in tokens]


def _in_order(_model: nn.Module, batch: MicroBatch) -> Tensor:
    """[B, T] places within each sample, as if it were alone."""
    return batch.positions


def _text_width(config: PretrainedConfig) -> int:
    return int(config.get_text_config().hidden_size)


def _tokens_of_tower(config: PretrainedConfig) -> int:
    vision = config.vision_config
    return int(vision.image_size // vision.patch_size) ** 2


def _tokens_of_grid(_config: PretrainedConfig) -> int:
    """Of an image of some five hundred pixels a side: these backbones have no size of their own."""
    return 256


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """Backbones that take images the same way."""

    model_type: str
    prompt: str
    """The text around a question."""
    image: str
    """What stands for one image in a prompt; {token} is expanded to its vision tokens."""
    fields: tuple[Field, ...]
    sizes: Callable[[ImageReader], SizeRule]
    encode: Callable[[ImageReader, Sequence[Image.Image]], Encoded]
    look: Callable[[nn.Module, MicroBatch], Vision]
    """One call of the vision tower."""
    merge: Callable[[ImageReader, dict[str, Any], Sequence[int], float], Encoded] = _merge_any
    """The arrays and tokens of a sample whose images a merger leaves so large a share of."""
    merged_width: Callable[[Any], int] = _text_width
    """Numbers of the features a merger works on: those of the projector, before it (LLaVA-1.5) or behind it."""
    common_tokens: Callable[[Any], int] = _tokens_of_tower
    """Vision tokens of a usual image: as many learned queries a pooling merger has, in its share."""
    places: Callable[[nn.Module, MicroBatch], Tensor] = _in_order
    """[B, T], or [3, B, T] where images have rows and columns of their own."""


_CHAT = "<|im_start|>user\n{images}{question}<|im_end|>\n<|im_start|>assistant\n"
_QWEN: dict[str, Any] = {
    "prompt": _CHAT,
    "image": "<|vision_start|>{token}<|vision_end|>",
    "fields": qwen_vl.FIELDS,
    "sizes": qwen_vl.grid_sizes,
    "encode": qwen_vl.encode_grids,
    "look": qwen_vl.look_grids,
    "merge": qwen_vl.merge_grids,
    "common_tokens": _tokens_of_grid,
    "places": qwen_vl.grid_places,
}
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llava",
            prompt="USER: {images}\n{question}\nASSISTANT:",
            image="{token}",
            fields=llava.FIELDS,
            sizes=llava.patch_sizes,
            encode=llava.encode_patches,
            look=llava.look_patches,
            merged_width=llava.vision_width,
        ),
        Family(
            model_type="llava_next",
            prompt="USER: {images}\n{question} ASSISTANT:",
            image="{token}",
            fields=llava_next.FIELDS,
            sizes=llava_next.tile_sizes,
            encode=llava_next.encode_tiles,
            look=llava_next.look_tiles,
        ),
        Family(model_type="qwen2_5_vl", **_QWEN),
        Family(model_type="qwen3_vl", **_QWEN),
    )
}
"""By the `model_type` of their configuration."""


def family_of(config: PretrainedConfig) -> Family:
    """The family of a backbone's configuration; others are refused by name."""
    found = FAMILIES.get(config.model_type)
    if found is None:
        raise ConfigError(
            "this backbone is not one whose vision tokens can be pruned",
            seen=f"model_type={config.model_type!r}",
            do=f"use one of {sorted(FAMILIES)}",
        )
    if getattr(config, "vision_feature_select_strategy", "default") != "default":
        raise ConfigError(
            "the class token as a vision token is not supported",
            seen=f"vision_feature_select_strategy={config.vision_feature_select_strategy!r}",
            do="use a backbone with the strategy 'default'",
        )
    return found
