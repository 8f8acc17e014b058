"""The pictures that kept results were measured on are drawn pixel by pixel as they were."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from PIL import Image, ImageDraw

from truebatch.testing.toy_images import SHAPES, draw_shape
from truebatch_systems.vl_reward.data.toy_pictures import ToyScene, draw_scene, read_scene
from truebatch_systems.vlm_pruning.data.toy_shapes import ShapeQuestions


def test_the_shapes_differ_and_stay_in_their_box():
    seen = set()
    for shape in SHAPES:
        image = Image.new("L", (24, 24))
        draw_shape(ImageDraw.Draw(image), shape, (4, 4, 18, 18), (255,))
        pixels = np.asarray(image)
        assert pixels[4:19, 4:19].any()
        assert pixels.sum() == pixels[4:19, 4:19].sum()
        seen.add(pixels.tobytes())
    assert len(seen) == len(SHAPES)


@pytest.mark.parametrize("shape", ["square", "circle", "triangle"])
def test_a_picture_is_read_again_as_what_was_drawn(shape):
    scene = ToyScene(shape, "blue", "left", (160, 96))
    assert read_scene(draw_scene(scene)) == scene


def test_seeds_give_the_pictures_they_gave():
    drawn = [np.asarray(one["image"]) for one in ShapeQuestions(images=16, seed=3, cell=13)]
    drawn += [np.asarray(draw_scene(ToyScene(s, "red", "top", (96, 160)))) for s in ("square", "circle", "triangle")]
    found = hashlib.sha256(b"".join(one.tobytes() for one in drawn)).hexdigest()
    assert found.startswith("d84c13113824dd49")
