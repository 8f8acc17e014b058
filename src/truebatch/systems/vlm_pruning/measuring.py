"""How long samples are, without opening an image where its number of vision tokens is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from truebatch.planning.rows import Ints
from truebatch.systems.vlm_pruning.encoding import Encoder
from truebatch.systems.vlm_pruning.sizing import fixed_side


def fixed_image_tokens(encoder: Encoder) -> int | None:
    """Vision tokens of every image, after a merger if there is one; None where they depend on the image."""
    reader = encoder.images
    rule = encoder.family.sizes(reader)
    side = fixed_side(reader.settings, rule)
    if side is None or reader.settings.image_aspect != "square":
        return None
    if encoder.merge_ratio is None:
        return rule.tokens(side, side)
    blank = Image.new("RGB", (side, side))
    arrays, tokens = encoder.family.encode(reader, [blank])
    return encoder.family.merge(reader, arrays, tokens, encoder.merge_ratio)[1][0]


def measure_tokens(encoder: Encoder, samples: Sequence[Any]) -> Ints:
    """[N] tokens of every encoded sample."""
    fixed = fixed_image_tokens(encoder)
    if fixed is None:
        found = [len(encoder.encode(sample)["input_ids"]) for sample in samples]
    else:
        found = [encoder.count(sample, [fixed] * _num_images(sample.get("image"))) for sample in samples]
    return np.array(found, dtype=np.int64)


def _num_images(image: Any) -> int:
    return len(image) if isinstance(image, list | tuple) else int(image is not None)
