"""How long samples are, without opening an image where its number of vision tokens is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from truebatch.planning.rows import Ints
from truebatch.systems.vlm_pruning.encoding import Encoder
from truebatch.systems.vlm_pruning.settings import AUTO


def fixed_image_tokens(encoder: Encoder) -> int | None:
    """Vision tokens of every image before a merger; None where they depend on the image."""
    mllm, config = encoder.images.settings, encoder.images.config
    if config.model_type != "llava" or mllm.unified_image_size == AUTO or mllm.image_aspect != "square":
        return None
    vision = config.vision_config
    side = int(mllm.unified_image_size or vision.image_size) // int(vision.patch_size)
    return side * side


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
