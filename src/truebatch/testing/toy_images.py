"""Shapes on a plain ground: what the embedded pictures of every system are drawn with."""

from __future__ import annotations

from typing import Any

SHAPES = ("circle", "square", "triangle", "cross")


def draw_shape(pen: Any, shape: str, box: tuple[float, float, float, float], colour: tuple[int, ...]) -> None:
    """Fill one of `SHAPES` into a box of left, top, right and bottom, with the `ImageDraw` of a picture."""
    left, top, right, bottom = box
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=colour)
    else:
        third = max(1, (right - left) // 3)
        pen.rectangle((left + third, top, right - third, bottom), fill=colour)
        pen.rectangle((left, top + third, right, bottom - third), fill=colour)
