"""Tiny backbones and samples of unequal questions for the tests of vlm_pruning."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from truebatch.batch.collate import collate
from truebatch.batch.keyed_random import name_purposes
from truebatch.batch.microbatch import MicroBatch
from truebatch.planning.rows import packed_row, padded_rows
from truebatch_systems.vlm_pruning.backbones.load import encoder_of, load_backbone
from truebatch_systems.vlm_pruning.config import BackboneSettings, MethodSettings, MllmSettings
from truebatch_systems.vlm_pruning.data.encode import encoded_fields
from truebatch_systems.vlm_pruning.model.model import PrunedVLM

METHOD = MethodSettings(
    pruning_layers=(1, 3),
    pruner_d_internal=16,
    pruner_num_heads=2,
    disc_d_d=16,
    disc_target_layers=(-1, -2, -3),
    use_token_num_target=False,
    target_sparsity=0.4,
)
QUESTIONS = (
    "Which?",
    "How many red circles are there on the left side of the picture, and how many are blue?",
    "What color is the large square in the middle?",
    "Is there a star above the green triangle or below the yellow cross, at the right side of the image?",
)
ANSWERS = ("two", "a large red circle", "blue", "no")


def picture(seed: int, height: int = 60, width: int = 90) -> Image.Image:
    noise = np.random.default_rng(seed).random((height, width, 3))
    return Image.fromarray((noise * 255).astype(np.uint8))


def samples(number: int = 4, *, images: int | None = None) -> list[dict[str, Any]]:
    """Questions whose lengths differ by far, with one or two images each."""
    made = []
    for at in range(number):
        count = images or 1 + at % 2
        shown = [picture(10 * at + k, 50 + 7 * k, 60 + 9 * at) for k in range(count)]
        made.append({"id": f"s{at}", "image": shown, "question": QUESTIONS[at % 4], "answer": ANSWERS[at % 4]})
    return made


@cache
def backbone_settings(name: str = "tiny-llava", **mllm: Any) -> BackboneSettings:
    return BackboneSettings(name=name, mllm_settings=MllmSettings(**mllm))


def build(name: str = "tiny-llava", method: MethodSettings = METHOD, seed: int = 0, **changes: Any) -> PrunedVLM:
    method = replace(method, **changes)
    backbone = load_backbone(backbone_settings(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PrunedVLM(backbone, encoder_of(backbone_settings(name), method).family, method)
        with torch.no_grad():  # masks that differ from token to token
            for head in model.pruners.values():
                head.logit.weight.mul_(4)
    name_purposes(model)
    return model.eval()


def encode(chosen: list[dict[str, Any]], name: str = "tiny-llava", method: MethodSettings = METHOD, **how: Any):
    encoder = encoder_of(backbone_settings(name), method)
    return [encoder.encode(sample, **how) for sample in chosen]


def batch_of(encoded: list[Any], name: str = "tiny-llava", *, ids: Any = None, layout: str = "right") -> MicroBatch:
    """One micro-batch: padded on a side, or packed into one row."""
    fields = encoded_fields(encoder_of(backbone_settings(name), METHOD).family)
    numbers = np.arange(len(encoded)) if ids is None else np.asarray(ids)
    lengths = [len(one["input_ids"]) for one in encoded]
    if layout == "packed":
        return collate(encoded, packed_row(numbers, sum(lengths) + 3), fields)
    return collate(encoded, padded_rows(numbers, max(lengths) + 2), fields, side=layout)


def alone(encoded: Any, sample_id: int, name: str = "tiny-llava", *, width: int | None = None) -> MicroBatch:
    """One sample in a row of its own length, or of a given one."""
    fields = encoded_fields(encoder_of(backbone_settings(name), METHOD).family)
    return collate([encoded], padded_rows(np.array([sample_id]), width or len(encoded["input_ids"])), fields)
