"""Images of Qwen2.5-VL and Qwen3-VL: as many patches as an image has, and places in rows and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.image_fields import sample_positions
from truebatch_systems.vlm_pruning.backbones.interface import ImageReader, Vision, ask_features
from truebatch_systems.vlm_pruning.data.image_size import SizeRule

PLACES = "image_places_thw"
"""The grid on which the vision tokens of an image stand: its own, or the coarser one a merger leaves."""
FIELDS = (
    Field(name="pixel_values", kind="flat", axis="patches", dtype="float32"),
    Field(name="image_grid_thw", kind="flat", axis="images", dtype="int64"),
    Field(name=PLACES, kind="flat", axis="images", dtype="int64", host=True),
)


def grid_sizes(reader: ImageReader) -> SizeRule:
    """Whole groups of patches; the processor leaves images alone that are neither too small nor too large for it."""
    vision = reader.config.vision_config
    unit = int(vision.patch_size * vision.spatial_merge_size)
    size = reader.processor.size
    return SizeRule(
        unit=unit,
        native=None,
        tokens=lambda height, width: (height // unit) * (width // unit),
        pixels=(int(size["shortest_edge"]), int(size["longest_edge"])),
    )


def encode_grids(reader: ImageReader, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    """Patches and grids of a sample's images, and the vision tokens of each."""
    vision = reader.config.vision_config
    if not images:
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        none = np.zeros((0, 3), np.int64)
        return {"pixel_values": torch.zeros(0, width), "image_grid_thw": none, PLACES: none}, []
    made = reader.processor(reader.sized(images, grid_sizes(reader)), return_tensors="pt")
    grids = made["image_grid_thw"]
    tokens = (grids.prod(dim=1) // vision.spatial_merge_size**2).tolist()
    return {"pixel_values": made["pixel_values"], "image_grid_thw": grids, PLACES: np.asarray(grids)}, tokens


def merge_grids(
    reader: ImageReader, arrays: dict[str, Any], tokens: Sequence[int], ratio: float
) -> tuple[dict[str, Any], list[int]]:
    """Merged tokens stand on a coarser grid of the same shape, never more of them than the share says."""
    group = int(reader.config.vision_config.spatial_merge_size)
    places = np.array([_coarser(grid, group, ratio) for grid in arrays[PLACES].tolist()], dtype=np.int64)
    kept = [int(n) for n in places.reshape(-1, 3).prod(axis=1) // group**2]
    assert len(kept) == len(tokens)
    return {**arrays, PLACES: places.reshape(-1, 3)}, kept


def _coarser(grid: Sequence[int], group: int, ratio: float) -> tuple[int, int, int]:
    times, rows, columns = grid[0], grid[1] // group, grid[2] // group
    fewer = max(1, min(rows, round(rows * math.sqrt(ratio))))
    most = max(1, math.floor(rows * columns * ratio / fewer + 1e-9))
    return times, fewer * group, min(columns, most) * group


def look_grids(model: nn.Module, batch: MicroBatch) -> Vision:
    """One call of the tower for all patches."""
    return ask_features(model, pixel_values=batch["pixel_values"], image_grid_thw=batch["image_grid_thw"])


def grid_places(model: nn.Module, batch: MicroBatch) -> Tensor:
    """[3, B, T]: time, height and width of every token, each as if its sample were alone."""
    ids = batch.per_sample(batch["input_ids"])
    grids = batch.per_sample(batch[PLACES], "images")
    axis = batch.rows()
    found = [sample_positions(model, tokens, grid) for tokens, grid in zip(ids, grids, strict=True)]
    return axis.put_tokens(torch.cat(found).to(axis.positions.device)).permute(2, 0, 1)
