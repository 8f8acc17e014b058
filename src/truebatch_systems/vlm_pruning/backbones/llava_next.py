"""Images of LLaVA-NeXT: a small whole and tiles, laid out by transformers' own processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch_systems.vlm_pruning.backbones.interface import ImageReader, Vision, ask_features
from truebatch_systems.vlm_pruning.data.image_size import SizeRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FIELDS = (
    Field(name="pixel_tiles", kind="flat", axis="tiles", dtype="float32"),
    Field(name="image_sizes", kind="flat", axis="images", dtype="int64", host=True),
)


def tile_sizes(reader: ImageReader) -> SizeRule:
    """Any size; the tiles it is cut into decide the number of tokens."""
    return SizeRule(unit=1, native=None, tokens=lambda height, width: _num_tokens(reader.config, (height, width)))


def encode_tiles(reader: ImageReader, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    """Tiles and sizes of a sample's images, and the vision tokens of each."""
    size = reader.config.vision_config.image_size
    if not images:
        return {"pixel_tiles": torch.zeros(0, 3, size, size), "image_sizes": np.zeros((0, 2), np.int64)}, []
    sized = reader.sized(images, tile_sizes(reader))
    made = [reader.processor([image], return_tensors="pt") for image in sized]
    tiles = torch.cat([one["pixel_values"][0] for one in made])
    sizes = torch.cat([one["image_sizes"] for one in made])
    return {"pixel_tiles": tiles, "image_sizes": sizes}, [_num_tokens(reader.config, s) for s in sizes.tolist()]


def _num_tokens(config: PretrainedConfig, size: Sequence[int]) -> int:
    """As many as the model packs: the small whole, and the tiles without their padding, a newline a row."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    rows, columns = get_anyres_image_grid_shape(
        tuple(size), config.image_grid_pinpoints, config.vision_config.image_size
    )
    whole = torch.empty((1, rows * side, columns * side), device="meta")
    _, height, width = unpad_image(whole, list(size)).shape
    tokens: int = side * side + int(height) * (int(width) + 1)
    return tokens


def look_tiles(model: nn.Module, batch: MicroBatch) -> Vision:
    """One call of the tower for all tiles."""
    return ask_features(model, pixel_values=batch["pixel_tiles"], image_sizes=batch["image_sizes"])
