"""Samples with images as a dataset: ids from memory, pixels through the model's own processor when a sample is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.errors import DataError
from truebatch.hf.finetune.token_store import Column, TokenStore
from truebatch.hf.finetune.vision.image_source import ImageSource, source_pixels
from truebatch.hf.finetune.vision.placeholders import placeholder_of
from truebatch.hf.image_fields import (
    OPTIONAL_IMAGE_FIELDS,
    STYLES,
    image_token_id,
    real_tiles,
    sample_positions,
    tiles_of,
)
from truebatch.planning.rows import Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageChatStore:
    """A data file with images: a dataset whose samples are dictionaries of arrays."""

    tokens: TokenStore
    images: Sequence[tuple[ImageSource, ...]]
    places: Sequence[str]
    patches: Ints
    processor: Any
    shapes: nn.Module
    """The model without its weights: its configuration, and where its positions are three numbers, how they are found."""
    style: str
    names: frozenset[str]
    """What the processor gives for an image and the model takes."""

    @property
    def columns(self) -> Mapping[str, Column]:
        """Ids and labels of all samples."""
        return self.tokens.columns

    @property
    def label_names(self) -> tuple[str, ...]:
        """None: answers are texts."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the start of a run."""
        return self.tokens.notes

    @property
    def costs(self) -> dict[str, Ints]:
        """Patches (or tiles) of every sample."""
        return {"patches": self.patches}

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, sample_id: int, /) -> dict[str, Any]:
        sample = self.tokens[sample_id]
        ids = torch.as_tensor(np.array(sample["input_ids"]))
        pixels = self._pixels(ids, self.images[sample_id], self.places[sample_id])
        sample |= pixels
        if "mrope_positions" in self.names:
            sample["mrope_positions"] = sample_positions(self.shapes, ids, pixels.get("image_grid_thw"))
        return sample

    def _pixels(self, ids: Tensor, images: Sequence[ImageSource], place: str) -> dict[str, Tensor]:
        names = self.names & _IMAGE_NAMES
        if not images:
            return {name: torch.zeros(0) for name in names}
        opened = [source_pixels(image, place) for image in images]
        text = placeholder_of(self.processor) * len(images)
        made = self.processor(text=[text], images=[opened], return_tensors="pt")
        self._refuse_other_length(made["input_ids"][0], ids, place)
        found = {name: torch.as_tensor(made[name]) for name in names}
        if self.style == "rows":
            found = {name: value[0] for name, value in found.items()}  # an axis of samples before that of images
        if self.style == "tiles" and found["pixel_values"].ndim == 5:
            numbers = tiles_of(self.shapes.config, found["image_sizes"], made.get("batch_num_images"))
            found["pixel_values"] = real_tiles(found["pixel_values"], numbers)
        return found

    def _refuse_other_length(self, made: Tensor, planned: Tensor, place: str) -> None:
        """The images as they are now must need the placeholders that were planned from their headers."""
        special = _special_ids(self.processor.tokenizer)
        now, then = (Counter(t for t in ids.tolist() if t in special) for ids in (made, planned))
        image = image_token_id(self.shapes)
        if now - then or now[image] != then[image]:
            raise DataError(
                f"{place}: its images need other placeholders than were planned from their headers",
                seen=f"{now[image]:,} image tokens now, {then[image]:,} planned",
                do="start the run again if images were changed since; else report this processor: "
                f"{type(self.processor).__name__}",
            )


_IMAGE_NAMES = frozenset({f.name for style in STYLES for f in style.fields} | {"pixel_attention_mask"})


def _special_ids(tokenizer: Any) -> set[int]:
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return (set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))) - ends


def image_names(style: str, made: Mapping[str, Any], model: nn.Module, accepts: frozenset[str]) -> frozenset[str]:
    """What of a processor's output, and what made from it, a sample carries."""
    fields = next(s.fields for s in STYLES if s.name == style)
    names = {f.name for f in fields} | {n for n in OPTIONAL_IMAGE_FIELDS if n in made and n in accepts}
    return frozenset(names)
