"""Images of LLaVA-1.5: patches of bytes, normalised on the device, one call of the tower for images of one size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.forward_inputs import inner_model
from truebatch_systems.vlm_pruning.backbones.interface import ImageReader, Vision
from truebatch_systems.vlm_pruning.data.image_io import cut_patches
from truebatch_systems.vlm_pruning.data.image_size import SizeRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PATCHES, GRID = "pixel_patches", "image_grid"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FIELDS = (
    Field(name=PATCHES, kind="flat", axis="patches", dtype="uint8"),
    Field(name=GRID, kind="flat", axis="images", dtype="int64", host=True),
)


def patch_sizes(reader: ImageReader) -> SizeRule:
    """Whole patches; other sizes than the tower's own get interpolated positions."""
    vision = reader.config.vision_config
    patch = int(vision.patch_size)
    return SizeRule(
        unit=patch, native=int(vision.image_size), tokens=lambda height, width: (height // patch) * (width // patch)
    )


def encode_patches(reader: ImageReader, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    """Patches and grids of a sample's images, and the vision tokens of each."""
    patches, grids = cut_patches(reader.sized(images, patch_sizes(reader)), reader.config.vision_config.patch_size)
    return {PATCHES: patches, GRID: grids}, [int(n) for n in grids.prod(axis=1)]


def look_patches(model: nn.Module, batch: MicroBatch) -> Vision:
    """Images of one size go through the tower together: one call where all are of one size."""
    grids = [(int(rows), int(columns)) for rows, columns in batch[GRID].tolist()]
    lengths = [rows * columns for rows, columns in grids]
    pixels = normalise(model, batch[PATCHES])
    if len(set(grids)) <= 1:
        found = tower_features(model, as_images(pixels, grids)) if grids else None
        features = pixels.new_zeros((0, vision_width(model.config))) if found is None else found.flatten(0, 1)
        return Vision(features, tuple(lengths), False)
    starts = np.cumsum([0, *lengths])
    parts: dict[int, Tensor] = {}
    for grid in dict.fromkeys(grids):
        chosen = [at for at, one in enumerate(grids) if one == grid]
        together = torch.cat([pixels[starts[at] : starts[at + 1]] for at in chosen])
        parts |= dict(zip(chosen, tower_features(model, as_images(together, [grid] * len(chosen))), strict=True))
    return Vision(torch.cat([parts[at] for at in range(len(grids))]), tuple(lengths), False)


def normalise(model: nn.Module, patches: Tensor) -> Tensor:
    """[n, 3 * p * p] bytes -> numbers as CLIP takes them, for all images of a micro-batch at once."""
    weight = next(model.parameters())
    if patches.dtype != torch.uint8:
        return patches.to(weight.dtype)
    mean, std = _statistics(patches.shape[1] // 3, patches.device)
    return ((patches.float() / 255.0 - mean) / std).to(weight.dtype)


@lru_cache(maxsize=8)
def _statistics(pixels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[3 * pixels] mean and spread of every number of a patch; copied to a device once."""
    mean, std = (torch.tensor(values).repeat_interleave(pixels).to(device) for values in (CLIP_MEAN, CLIP_STD))
    return mean, std


def as_images(patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Patches of images of one size -> [I, 3, H, W]."""
    rows, columns = grids[0]
    side = int((patches.shape[1] // 3) ** 0.5)
    tiles = patches.view(len(grids), rows, columns, 3, side, side)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(len(grids), 3, rows * side, columns * side)


def tower_features(model: nn.Module, images: Tensor) -> Tensor:
    """[I, 3, H, W] -> [I, n, width]: the layers the backbone asks for, without the class token."""
    inner: Any = inner_model(model)
    config: PretrainedConfig = inner.config
    native = config.vision_config.image_size
    is_other = tuple(images.shape[-2:]) != (native, native)
    more = {"interpolate_pos_encoding": True} if is_other else {}
    hidden = inner.vision_tower(images, output_hidden_states=True, return_dict=True, **more).hidden_states
    layers = config.vision_feature_layer
    wanted = [layers] if isinstance(layers, int) else list(layers)
    return torch.cat([hidden[layer][:, 1:] for layer in wanted], dim=-1)


def vision_width(config: PretrainedConfig) -> int:
    """Numbers of a feature before the projector."""
    layers = config.vision_feature_layer
    return int(config.vision_config.hidden_size) * (1 if isinstance(layers, int) else len(layers))
