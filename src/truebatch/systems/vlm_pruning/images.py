"""Images before the model: opened, sized, and cut into patches of bytes.

image -> RGB -> size of its own or a common one -> patches [n, 3 * p * p] of bytes and a grid (rows, columns)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from truebatch.errors import ConfigError, DataError
from truebatch.systems.vlm_pruning.settings import AUTO, MllmSettings

Bytes = NDArray[np.uint8]
_RESAMPLE = Image.Resampling.LANCZOS


def open_images(image: Any, *, sample: str) -> list[Image.Image]:
    """The images of a sample, from images, paths or lists of them; RGB. What was given is never closed or changed."""
    given = image if isinstance(image, list | tuple) else [] if image is None else [image]
    return [_open(one, sample) for one in given]


def _open(image: Any, sample: str) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    try:
        with Image.open(Path(image)) as opened:
            return opened.convert("RGB")
    except (OSError, UnidentifiedImageError, TypeError, Image.DecompressionBombError) as error:
        raise DataError(
            f"sample {sample!r} has an image that cannot be opened",
            seen=f"{str(image)[:200]!r} ({type(error).__name__}: {str(error)[:120]})",
            do="check the path and the file, or leave the sample out",
        ) from error


def resize_image(image: Image.Image, settings: MllmSettings, *, native: int, patch: int) -> Image.Image:
    """The image as the vision tower gets it: sides are multiples of a patch."""
    shrunk = shrink_image(image, settings.image_max_size)
    side = choose_side(shrunk, settings, native=native, patch=patch)
    rows, columns = _grid(shrunk, side, patch, keeps_aspect=settings.image_aspect == "keep")
    return shrunk.resize((columns * patch, rows * patch), _RESAMPLE)


def shrink_image(image: Image.Image, longest: int | None) -> Image.Image:
    """The image with its longest side at most `longest` pixels, its aspect kept."""
    if longest is None or max(image.size) <= longest:
        return image
    factor = longest / max(image.size)
    width, height = (max(1, round(side * factor)) for side in image.size)
    return image.resize((width, height), _RESAMPLE)


def choose_side(image: Image.Image, settings: MllmSettings, *, native: int, patch: int) -> int:
    """The side of a square with as many tokens as the image shall have."""
    size = settings.unified_image_size
    if size is None:
        return native
    if size != AUTO:
        return _whole(int(size), patch)
    sizes = sorted(_whole(one, patch) for one in settings.image_sizes)
    allowed = [
        s for s in sizes if settings.image_token_budget is None or (s // patch) ** 2 <= settings.image_token_budget
    ]
    if not allowed:
        raise ConfigError(
            "no image size fits the token budget",
            seen=f"image_token_budget={settings.image_token_budget}, smallest size {sizes[0]} has {(sizes[0] // patch) ** 2}",
            do="raise image_token_budget or add a smaller size to image_sizes",
        )
    return next((s for s in allowed if detail_lost(image, s, largest=sizes[-1]) <= settings.image_detail), allowed[-1])


def detail_lost(image: Image.Image, side: int, *, largest: int) -> float:
    """Root mean square difference, of full scale, between the image at the largest size and by way of a smaller one."""
    whole = image.convert("L").resize((largest, largest), _RESAMPLE)
    small = whole.resize((side, side), _RESAMPLE).resize((largest, largest), _RESAMPLE)
    difference = np.asarray(whole, dtype=np.float32) - np.asarray(small, dtype=np.float32)
    return float(np.sqrt(np.mean(difference**2)) / 255.0)


def _whole(side: int, patch: int) -> int:
    if side < patch:
        raise ConfigError(
            "an image size is smaller than a patch", seen=f"{side} pixels, patches of {patch}", do="use a larger size"
        )
    return side // patch * patch


def _grid(image: Image.Image, side: int, patch: int, *, keeps_aspect: bool) -> tuple[int, int]:
    number = side // patch
    if not keeps_aspect:
        return number, number
    width, height = image.size
    rows = max(1, round(number * math.sqrt(height / width)))
    return rows, max(1, min(round(number * math.sqrt(width / height)), number * number // rows))


def cut_patches(images: Sequence[Image.Image], patch: int) -> tuple[Bytes, NDArray[np.int64]]:
    """Patches of all images [n, 3 * p * p], row after row, and the grid (rows, columns) of each image [I, 2]."""
    grids = np.array([[i.height // patch, i.width // patch] for i in images], dtype=np.int64).reshape(-1, 2)
    cut = [_cut(np.asarray(image, dtype=np.uint8), patch) for image in images]
    return np.concatenate(cut) if cut else np.zeros((0, 3 * patch * patch), np.uint8), grids


def _cut(pixels: Bytes, patch: int) -> Bytes:
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    tiles = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(tiles).reshape(rows * columns, 3 * patch * patch)
