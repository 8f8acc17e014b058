"""Sizes of images before the vision tower: the backbone's own, one for all, or one picked for each by its content.

image -> shrunk to image_max_size -> (rows, columns) of units -> resized;   a `SizeRule` is all that differs by backbone
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from truebatch.errors import ConfigError
from truebatch_systems.vlm_pruning.config import AUTO, MllmSettings

RESAMPLE = Image.Resampling.LANCZOS
_GAP = 3.0
"""An image many times larger is first reduced by whole factors, to no less than so many times its new size."""


_FLAT = 1.0
"""Of 255: an image that varies less is of one colour."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SizeRule:
    """How a backbone takes image sizes."""

    unit: int
    """Sides are multiples of so many pixels."""
    native: int | None
    """The side the vision tower was made for; None for a backbone that takes images as they are."""
    tokens: Callable[[int, int], int]
    """(height, width) in pixels -> vision tokens."""
    pixels: tuple[int, int] | None = None
    """Fewest and most pixels of an image that the backbone does not size again."""


def resize_image(image: Image.Image, settings: MllmSettings, rule: SizeRule) -> Image.Image:
    """The image as the vision tower gets it: sides are multiples of a unit; as it is where nothing sets its size."""
    shrunk = shrink_image(image, settings.image_max_size)
    side = choose_side(shrunk, settings, rule)
    if side is None:
        return shrunk
    rows, columns = _grid(shrunk, side, rule.unit, keeps_aspect=settings.image_aspect == "keep")
    size = (columns * rule.unit, rows * rule.unit)
    return shrunk.resize(size, RESAMPLE, reducing_gap=_GAP)


def shrink_image(image: Image.Image, longest: int | None) -> Image.Image:
    """The image with its longest side at most `longest` pixels, its aspect kept."""
    if longest is None or max(image.size) <= longest:
        return image
    factor = longest / max(image.size)
    width, height = (max(1, round(side * factor)) for side in image.size)
    return image.resize((width, height), RESAMPLE)


def choose_side(image: Image.Image, settings: MllmSettings, rule: SizeRule) -> int | None:
    """The side of a square with as many tokens as the image shall have; None leaves the size to the backbone."""
    if settings.unified_image_size != AUTO:
        return fixed_side(settings, rule)
    sizes = listed_sides(settings, rule)
    allowed = [side for side in sizes if _fits(side, settings, rule)]
    if not allowed:
        raise ConfigError(
            "no image size fits the token budget",
            seen=f"image_token_budget={settings.image_token_budget}, "
            f"smallest size {sizes[0]} has {rule.tokens(sizes[0], sizes[0])}",
            do="raise image_token_budget or add a smaller size to image_sizes",
        )
    return next((s for s in allowed if detail_lost(image, s, largest=sizes[-1]) <= settings.image_detail), allowed[-1])


def fixed_side(settings: MllmSettings, rule: SizeRule) -> int | None:
    """The side of every image; None where images keep sizes of their own."""
    size = settings.unified_image_size
    return rule.native if size is None else None if size == AUTO else _whole(int(size), rule)


def listed_sides(settings: MllmSettings, rule: SizeRule) -> list[int]:
    """What `auto` picks from, small to large."""
    return sorted(_whole(one, rule) for one in settings.image_sizes)


def check_sizes(settings: MllmSettings, rule: SizeRule) -> None:
    """Refuse sizes the backbone would not take as they are, before anything runs."""
    if settings.unified_image_size == AUTO:
        listed_sides(settings, rule)
    else:
        fixed_side(settings, rule)


def _fits(side: int, settings: MllmSettings, rule: SizeRule) -> bool:
    return settings.image_token_budget is None or rule.tokens(side, side) <= settings.image_token_budget


def detail_lost(image: Image.Image, side: int, *, largest: int) -> float:
    """The share of an image's variation, as root mean squares over all colours, that a smaller size loses.

    Small things lose more than large ones, whatever their contrast; an image of one colour loses nothing.
    """
    whole = image.resize((largest, largest), RESAMPLE, reducing_gap=_GAP)
    small = whole.resize((side, side), RESAMPLE).resize((largest, largest), RESAMPLE)
    before, after = (np.asarray(one, dtype=np.float32) for one in (whole, small))
    varied = float(np.sqrt(np.mean((before - before.mean(axis=(0, 1))) ** 2)))
    return float(np.sqrt(np.mean((before - after) ** 2))) / varied if varied > _FLAT else 0.0


def _whole(side: int, rule: SizeRule) -> int:
    if side < rule.unit:
        raise ConfigError(
            "an image size is smaller than a patch",
            seen=f"{side} pixels, patches of {rule.unit}",
            do="use a larger size",
        )
    whole = side // rule.unit * rule.unit
    least, most = rule.pixels or (1, whole * whole)
    if not least <= whole * whole <= most:
        raise ConfigError(
            "the image processor of this backbone would size such images again",
            seen=f"{whole} x {whole} pixels, it takes {least} to {most} pixels as they are",
            do=f"use sizes from {math.isqrt(least - 1) + 1} to {math.isqrt(most)}",
        )
    return whole


def _grid(image: Image.Image, side: int, unit: int, *, keeps_aspect: bool) -> tuple[int, int]:
    number = side // unit
    if not keeps_aspect:
        return number, number
    width, height = image.size
    rows = max(1, round(number * math.sqrt(height / width)))
    return rows, max(1, min(round(number * math.sqrt(width / height)), number * number // rows))
