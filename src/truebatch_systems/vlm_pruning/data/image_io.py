"""Images before the model: opened, and cut into patches of bytes.

image -> RGB -> (sized) -> patches [n, 3 * p * p] of bytes and a grid (rows, columns)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from truebatch.errors import DataError
from truebatch.io.images import rgb_image
from truebatch.planning.lengths.image_size import opened_image

Bytes = NDArray[np.uint8]


def open_images(image: Any, *, sample: str) -> list[Image.Image]:
    """The images of a sample, from images, paths or lists of them; RGB. What was given is never closed or changed."""
    given = image if isinstance(image, list | tuple) else [] if image is None else [image]
    return [_open(one, sample) for one in given]


def _open(image: Any, sample: str) -> Image.Image:
    if isinstance(image, Image.Image):
        return rgb_image(image)
    try:
        with opened_image(Path(image)) as opened:
            opened.load()
            return rgb_image(opened)
    except (OSError, SyntaxError, ValueError, ArithmeticError, TypeError, Image.DecompressionBombError) as error:
        raise DataError(
            f"sample {sample!r} has an image that cannot be opened",
            seen=f"{str(image)[:200]!r} ({type(error).__name__}: {str(error)[:120]})",
            do="check the path and the file, or leave the sample out",
        ) from error


def cut_patches(images: Sequence[Image.Image], patch: int) -> tuple[Bytes, NDArray[np.int64]]:
    """Patches of all images [n, 3 * p * p], row after row, and the grid (rows, columns) of each image [I, 2]."""
    grids = np.array([[i.height // patch, i.width // patch] for i in images], dtype=np.int64).reshape(-1, 2)
    cut = [_cut(np.asarray(image, dtype=np.uint8), patch) for image in images]
    return np.concatenate(cut) if cut else np.zeros((0, 3 * patch * patch), np.uint8), grids


def _cut(pixels: Bytes, patch: int) -> Bytes:
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    tiles = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(tiles).reshape(rows * columns, 3 * patch * patch)
