"""Four families of backbones behind one interface: how their images are encoded, and what their vision tower gives.

images of a sample -> arrays and vision tokens an image;  micro-batch -> one call of the tower -> vision features
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

from truebatch.errors import ConfigError
from truebatch.hf.inputs import inner_model
from truebatch.systems.vlm_pruning.images import cut_patches, resize_image
from truebatch.systems.vlm_pruning.settings import MllmSettings
from truebatch.tensors.field import Field
from truebatch.tensors.microbatch import MicroBatch

PATCHES, GRID = "pixel_patches", "image_grid"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, eq=False)
class ImageReader:
    """What is needed to encode images, without weights."""

    config: Any
    """Of the backbone."""
    processor: Any
    """transformers' image processor, where the family uses it."""
    settings: MllmSettings


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """Backbones that take images the same way."""

    model_type: str
    prompt: str
    """The text around a question."""
    image: str
    """What stands for one image in a prompt; {token} is expanded to its vision tokens."""
    fields: tuple[Field, ...]
    encode: Callable[[ImageReader, Sequence[Image.Image]], tuple[dict[str, Any], list[int]]]
    """Arrays of a sample's images, and the vision tokens of each."""
    look: Callable[[nn.Module, MicroBatch], Vision]
    """One call of the vision tower."""
    can_merge: bool = False


def _encode_patches(reader: ImageReader, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    vision = reader.config.vision_config
    sized = [resize_image(i, reader.settings, native=vision.image_size, patch=vision.patch_size) for i in images]
    patches, grids = cut_patches(sized, vision.patch_size)
    return {PATCHES: patches, GRID: grids}, [int(n) for n in grids.prod(axis=1)]


def _look_llava(model: nn.Module, batch: MicroBatch) -> Vision:
    """Images of one size go through the tower together: one call where all are of one size."""
    grids = [(int(rows), int(columns)) for rows, columns in batch[GRID].tolist()]
    lengths = [rows * columns for rows, columns in grids]
    pixels = _normalise(model, batch[PATCHES])
    if len(set(grids)) <= 1:
        found = _tower(model, _images(pixels, grids)) if grids else None
        features = pixels.new_zeros((0, _vision_width(model))) if found is None else found.flatten(0, 1)
        return Vision(features, tuple(lengths), False)
    starts = np.cumsum([0, *lengths])
    parts: dict[int, Tensor] = {}
    for grid in dict.fromkeys(grids):
        chosen = [at for at, one in enumerate(grids) if one == grid]
        together = torch.cat([pixels[starts[at] : starts[at + 1]] for at in chosen])
        parts |= dict(zip(chosen, _tower(model, _images(together, [grid] * len(chosen))), strict=True))
    return Vision(torch.cat([parts[at] for at in range(len(grids))]), tuple(lengths), False)


def _normalise(model: nn.Module, patches: Tensor) -> Tensor:
    """[n, 3 * p * p] bytes -> numbers as CLIP takes them, for all images of a micro-batch at once."""
    weight = next(model.parameters())
    mean, std = (torch.tensor(v, device=patches.device).repeat_interleave(patches.shape[1] // 3) for v in _STATISTICS)
    if patches.dtype != torch.uint8:
        return patches.to(weight.dtype)
    return ((patches.float() / 255.0 - mean) / std).to(weight.dtype)


_STATISTICS = (CLIP_MEAN, CLIP_STD)


def _images(patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Patches of images of one size -> [I, 3, H, W]."""
    rows, columns = grids[0]
    side = int((patches.shape[1] // 3) ** 0.5)
    tiles = patches.view(len(grids), rows, columns, 3, side, side)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(len(grids), 3, rows * side, columns * side)


def _tower(model: nn.Module, images: Tensor) -> Tensor:
    """[I, 3, H, W] -> [I, n, width]: the layers the backbone asks for, without the class token."""
    inner: Any = inner_model(model)
    config: Any = inner.config
    native = config.vision_config.image_size
    is_other = tuple(images.shape[-2:]) != (native, native)
    more = {"interpolate_pos_encoding": True} if is_other else {}
    hidden = inner.vision_tower(images, output_hidden_states=True, return_dict=True, **more).hidden_states
    layers = config.vision_feature_layer
    wanted = [layers] if isinstance(layers, int) else list(layers)
    return torch.cat([hidden[layer][:, 1:] for layer in wanted], dim=-1)


def _vision_width(model: nn.Module) -> int:
    config: Any = inner_model(model).config
    layers = config.vision_feature_layer
    return int(config.vision_config.hidden_size) * (1 if isinstance(layers, int) else len(layers))


def _encode_tiles(reader: ImageReader, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    size = reader.config.vision_config.image_size
    if not images:
        return {"pixel_tiles": torch.zeros(0, 3, size, size), "image_sizes": np.zeros((0, 2), np.int64)}, []
    made = [reader.processor([image], return_tensors="pt") for image in images]
    tiles = torch.cat([one["pixel_values"][0] for one in made])
    sizes = torch.cat([one["image_sizes"] for one in made])
    return {"pixel_tiles": tiles, "image_sizes": sizes}, [_num_tile_tokens(reader.config, s) for s in sizes.tolist()]


def _num_tile_tokens(config: Any, size: Sequence[int]) -> int:
    """As many as the model packs: the small whole, and the tiles without their padding, a newline a row."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    rows, columns = get_anyres_image_grid_shape(
        tuple(size), config.image_grid_pinpoints, config.vision_config.image_size
    )
    whole = torch.empty((1, rows * side, columns * side), device="meta")
    _, height, width = unpad_image(whole, list(size)).shape
    tokens: int = side * side + int(height) * (int(width) + 1)
    return tokens


def _look_tiles(model: nn.Module, batch: MicroBatch) -> Vision:
    return _asked(model, batch, pixel_values=batch["pixel_tiles"], image_sizes=batch["image_sizes"])


def _encode_grid(reader: ImageReader, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    vision = reader.config.vision_config
    if not images:
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.zeros(0, width), "image_grid_thw": np.zeros((0, 3), np.int64)}, []
    made = reader.processor(list(images), return_tensors="pt")
    grids = made["image_grid_thw"]
    tokens = (grids.prod(dim=1) // vision.spatial_merge_size**2).tolist()
    return {"pixel_values": made["pixel_values"], "image_grid_thw": grids}, tokens


def _look_grid(model: nn.Module, batch: MicroBatch) -> Vision:
    return _asked(model, batch, pixel_values=batch["pixel_values"], image_grid_thw=batch["image_grid_thw"])


def _asked(model: nn.Module, batch: MicroBatch, *, pixel_values: Tensor, **beside: Tensor) -> Vision:
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


_CHAT = "<|im_start|>user\n{images}{question}<|im_end|>\n<|im_start|>assistant\n"
_QWEN_FIELDS = (
    Field(name="pixel_values", kind="flat", axis="patches", dtype="float32"),
    Field(name="image_grid_thw", kind="flat", axis="images", dtype="int64"),
)
_QWEN = {
    "prompt": _CHAT,
    "image": "<|vision_start|>{token}<|vision_end|>",
    "fields": _QWEN_FIELDS,
    "encode": _encode_grid,
    "look": _look_grid,
}
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llava",
            prompt="USER: {images}\n{question}\nASSISTANT:",
            image="{token}",
            fields=(
                Field(name=PATCHES, kind="flat", axis="patches", dtype="uint8"),
                Field(name=GRID, kind="flat", axis="images", dtype="int64", host=True),
            ),
            encode=_encode_patches,
            look=_look_llava,
            can_merge=True,
        ),
        Family(
            model_type="llava_next",
            prompt="USER: {images}\n{question} ASSISTANT:",
            image="{token}",
            fields=(
                Field(name="pixel_tiles", kind="flat", axis="tiles", dtype="float32"),
                Field(name="image_sizes", kind="flat", axis="images", dtype="int64", host=True),
            ),
            encode=_encode_tiles,
            look=_look_tiles,
        ),
        Family(model_type="qwen2_5_vl", **_QWEN),  # type: ignore[arg-type]
        Family(model_type="qwen3_vl", **_QWEN),  # type: ignore[arg-type]
    )
}
"""By the `model_type` of their configuration."""


def family_of(config: Any) -> Family:
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
