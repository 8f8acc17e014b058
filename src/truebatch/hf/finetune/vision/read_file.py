"""A data file with images as samples: checked, encoded, and over-long ones refused, left out or cut as the user asked.

model folder -> processor and shapes -> records -> encoded conversations -> ImageChatStore
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from truebatch.errors import ConfigError, DataError
from truebatch.hf.finetune.token_store import TokenStore, make_columns
from truebatch.hf.finetune.vision.encode import EncodedImageChat, ImageChatEncoder
from truebatch.hf.finetune.vision.placeholders import is_prefix_processor, placeholder_of
from truebatch.hf.finetune.vision.samples import ImageChatStore, image_names
from truebatch.hf.forward_inputs import inspect_forward
from truebatch.hf.heads.losses import IGNORE
from truebatch.hf.image_fields import image_token_id, refuse_images, style_of
from truebatch.hf.pretrained import shape_of
from truebatch.hf.processors import load_processor
from truebatch.io.data_files import read_samples
from truebatch.io.text_encoding import read_text
from truebatch.planning.config import Overlong
from truebatch.progress import counted

_PROBE = (64, 96)
"""Height and width of the blank image that shows what a processor gives."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageChatReader:
    """One model folder, ready to read data files for it."""

    processor: Any
    shapes: nn.Module
    style: str
    names: frozenset[str]

    def read(self, path: Path, *, folder: Path | None, max_length: int | None, overlong: Overlong) -> ImageChatStore:
        """Every sample of a file; relative paths of images begin at `folder`, or beside the file."""
        encoder = ImageChatEncoder(self.processor, path.parent if folder is None else folder)
        found = [encoder.encode(sample, place) for place, sample in counted(read_samples(path), f"reading {path}")]
        if not found:
            raise DataError(
                f"{path} holds no samples", seen="nothing to train on", do="check that it is the right file"
            )
        self._refuse_missing_images(found)
        kept, more = _fitted(found, max_length, overlong, image_token_id(self.shapes), path)
        columns = make_columns([one.columns for one in kept])
        tokens = TokenStore(columns, (), (f"{path}: {_described(kept)}", *more))
        return ImageChatStore(
            tokens=tokens, images=[one.images for one in kept], places=[one.place for one in kept],
            patches=np.array([one.patches for one in kept], dtype=np.int64), processor=self.processor,
            shapes=self.shapes, style=self.style, names=self.names,
        )  # fmt: skip

    def _refuse_missing_images(self, found: Sequence[EncodedImageChat]) -> None:
        without = [one.place for one in found if not one.images]
        if without and is_prefix_processor(self.processor):
            raise DataError(
                f"{without[0]} has no image, and this model reads none of its prompts without one",
                seen=f"{len(without):,} of {len(found):,} samples without an image, {type(self.processor).__name__}",
                do="remove them, or train them with another model",
            )


def image_chat_reader(folder: Path, configuration: Any, chat_template: Path | None) -> ImageChatReader:
    """What reads conversations with images for the model of a folder; a model of text alone raises `ConfigError`."""
    processor = image_processor_of(folder, chat_template)
    try:
        shapes = shape_of(configuration, "vlm")
    except DataError as error:
        raise _text_only(folder, configuration) from error
    border = inspect_forward(shapes)
    style = style_of(shapes, border)
    if style is None:
        raise refuse_images(shapes, border)
    made = _probed(processor, folder)
    names = set(image_names(style.name, made, shapes, border.accepts))
    if border.has_grid_positions:
        names.add("mrope_positions")
    return ImageChatReader(processor, shapes, style.name, frozenset(names))


def image_processor_of(folder: Path, chat_template: Path | None) -> Any:
    """The processor of a model folder, with another chat template if one is given; one for text alone is refused."""
    processor = load_processor(folder)
    if not hasattr(processor, "image_processor"):
        raise ConfigError(
            f"{folder} has no processor for images, and --task vlm needs one",
            seen=f"its processor is {type(processor).__name__}, for text alone",
            do="name the folder of a vision-language model with its preprocessor_config.json or processor_config.json; "
            "a model of text is trained with --task causal_lm",
        )
    processor.tokenizer.model_max_length = 10**9  # a long sample is handled by the settings
    if chat_template is not None:
        processor.chat_template = read_text(chat_template, max_bytes=1 << 20)
    return processor


def _text_only(folder: Path, configuration: Any) -> ConfigError:
    return ConfigError(
        f"{folder} holds no model that reads images and writes text",
        seen=f"model_type={configuration.model_type!r}",
        do="name the folder of a vision-language model; a model of text is trained with --task causal_lm",
    )


def _probed(processor: Any, folder: Path) -> dict[str, Any]:
    """What the processor gives for one image."""
    from PIL import Image

    blank = Image.new("RGB", (_PROBE[1], _PROBE[0]))
    try:
        return dict(processor(text=[placeholder_of(processor)], images=[[blank]], return_tensors="pt"))
    except Exception as error:  # a processor whose settings do not fit fails in any line of its own code
        raise DataError(
            f"the processor in {folder} cannot read an image",
            seen=f"{type(error).__name__}: {str(error)[:200]}",
            do="check its preprocessor_config.json; score and train need the same processor as the model was made with",
        ) from error


def _fitted(
    found: Sequence[EncodedImageChat], most: int | None, overlong: Overlong, image: int | None, path: Path
) -> tuple[list[EncodedImageChat], list[str]]:
    long = [one for one in found if most is not None and len(one.columns["input_ids"]) > most]
    if not long or most is None:
        return list(found), []
    words = f"{len(long):,} of {len(found):,} samples have more than {most:,} tokens"
    worst = max(long, key=lambda one: len(one.columns["input_ids"]))
    if overlong == "refuse":
        raise DataError(
            f"{path}: {words}",
            seen=f"{worst.place} has {len(worst.columns['input_ids']):,} tokens, those of its images included",
            do="--set overlong=drop leaves them out, --set overlong=cut keeps their beginnings; both are counted; smaller "
            "images take fewer tokens",
        )
    if overlong == "cut":
        return _cut(found, most, image, path, words)
    gone = {id(one) for one in long}
    kept = [one for one in found if id(one) not in gone]
    if not kept:
        raise DataError(f"{path}: no sample is left", seen=f"{words}: dropped", do="raise max_length")
    return kept, [f"{words}: dropped"]


def _cut(
    found: Sequence[EncodedImageChat], most: int, image: int | None, path: Path, words: str
) -> tuple[list[EncodedImageChat], list[str]]:
    broken = next((one for one in found if image in one.columns["input_ids"][most:]), None)
    if broken is not None:
        raise DataError(
            f"{path}: a cut would go through an image",
            seen=f"{broken.place} has image tokens behind its first {most:,} tokens",
            do="--set overlong=drop leaves such samples out, or raise max_length, or scale the images",
        )
    cut = [replace(one, columns={name: ids[:most] for name, ids in one.columns.items()}) for one in found]
    mute = sum(all(label == IGNORE for label in one.columns["labels"]) for one in cut)
    if mute == len(cut):
        raise DataError(f"{path} has nothing to learn from", seen=f"{words}: cut", do="raise max_length")
    return cut, [f"{words}: cut" + (f"; {mute:,} have nothing left to learn" if mute else "")]


def _described(kept: Sequence[EncodedImageChat]) -> str:
    tokens = sum(len(one.columns["input_ids"]) for one in kept)
    learned = sum(label != IGNORE for one in kept for label in one.columns["labels"])
    images = sum(len(one.images) for one in kept)
    return (
        f"{len(kept):,} samples, {images:,} images, {tokens:,} tokens, {learned:,} labels; only answers are learned, sizes "
        "are from the headers of the images"
    )
