"""Pixels of an image as every part of the package sees them: upright, 8 bits per colour, RGB, on white.

image -> first frame -> turned as its EXIF says -> 16-bit grey scaled -> transparency on white -> RGB
"""

from __future__ import annotations

from typing import Any

import numpy as np

ORIENTATION = 0x0112
QUARTER_TURNS = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""
_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_MOST_16_BIT = 65_535


def rgb_image(image: Any) -> Any:
    """A Pillow image as a new one in RGB; of several frames the first.

    Pillow's own conversion clips 16-bit grey to white. Pixels without a common scale (floats, 32-bit grey) raise
    `ValueError`.
    """
    from PIL import Image, ImageOps

    if getattr(image, "n_frames", 1) > 1:
        image.seek(0)
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in _DEEP_GREY:
        image = _eight_bit_grey(image)
    if image.mode == "F":
        raise ValueError("pixels are floating-point numbers, which have no common scale; save it with 8 or 16 bits")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        whole = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")
    return image.convert("RGB")


def upright_size(image: Any) -> tuple[int, int]:
    """(height, width) of the pixels of an image in memory, as `rgb_image` gives them."""
    is_turned = image.getexif().get(ORIENTATION, 1) in QUARTER_TURNS
    return (int(image.width), int(image.height)) if is_turned else (int(image.height), int(image.width))


def _eight_bit_grey(image: Any) -> Any:
    """16-bit grey as 8-bit grey, or with an alpha channel where one value is transparent."""
    from PIL import Image

    pixels = np.asarray(image).astype(np.int64)
    if pixels.size and not 0 <= pixels.min() <= pixels.max() <= _MOST_16_BIT:
        raise ValueError("pixels are 32-bit numbers, which have no common scale; save it with 8 or 16 bits")
    grey = Image.fromarray((pixels >> 8).astype(np.uint8))  # as Pillow reads 16-bit colour
    clear = image.info.get("transparency")
    if not isinstance(clear, int):
        return grey
    grey.putalpha(Image.fromarray(np.where(pixels == clear, 0, 255).astype(np.uint8)))
    return grey
