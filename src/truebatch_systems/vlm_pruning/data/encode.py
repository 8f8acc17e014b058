"""Samples as the model reads them: tokens with image placeholders expanded, what each token is, and the images.

A sample maps id, image (an image, a path, or a list of them), question, answer, answers, choices and category.
{id, image, question, answer} -> input_ids, is_vision / is_question / is_answer a token, places of each kind, pixels

How long samples are, without opening an image where its number of vision tokens is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from truebatch.batch.fields import Field
from truebatch.errors import DataError
from truebatch.planning.rows import Ints
from truebatch_systems.vlm_pruning.backbones.families import Family
from truebatch_systems.vlm_pruning.backbones.interface import ImageReader
from truebatch_systems.vlm_pruning.data.image_io import open_images
from truebatch_systems.vlm_pruning.data.image_size import fixed_side

Sample = Mapping[str, Any]
VISION, QUESTION, TEXT, ANSWER = "vision", "question", "text", "answer"
"""Axes of a micro-batch: the tokens of a kind, each with its place in the sample (fields `vision_at`, ...)."""
_KINDS = (VISION, QUESTION, TEXT, ANSWER)
IMAGE_TOKENS = "image_tokens"
"""Of every image: the vision tokens that stand in its sample, after a merger if there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleEncoder:
    """Turns samples into encoded samples; the same sample always gives the same."""

    family: Family
    images: ImageReader
    tokenizer: Any
    image_id: int
    end_id: int | None
    prompt: str
    merge_ratio: float | None = None
    """The share of an image's vision tokens that a merger leaves; None without a merger."""

    def encode(self, sample: Sample, *, with_answer: bool = True) -> dict[str, Any]:
        """One encoded sample. Without its answer it is the prompt that generation continues."""
        name = str(sample.get("id", "?"))
        arrays, tokens = self.family.encode(self.images, open_images(sample.get("image"), sample=name))
        if self.merge_ratio is not None:
            arrays, tokens = self.family.merge(self.images, arrays, tokens, self.merge_ratio)
        prompt = self._prompt_ids(sample, tokens, name)
        answer = self._answer_ids(sample, len(tokens), name) if with_answer else []
        counted = {IMAGE_TOKENS: np.array(tokens, dtype=np.int64)}
        return {**mark_tokens(prompt, answer, self.image_id), **arrays, **counted}

    def unmerged(self) -> SampleEncoder:
        """The encoder of the backbone as it is, without a merger."""
        return self if self.merge_ratio is None else replace(self, merge_ratio=None)

    def count(self, sample: Sample, tokens: Sequence[int]) -> int:
        """Tokens of an encoded sample whose images take so many places; no image is opened."""
        name = str(sample.get("id", "?"))
        return len(self._prompt_ids(sample, tokens, name)) + len(self._answer_ids(sample, len(tokens), name))

    def _text(self, sample: Sample, number: int) -> str:
        token = self.tokenizer.convert_ids_to_tokens(self.image_id)
        return self.prompt.format(
            images="".join([self.family.image.format(token=token)] * number), question=str(sample["question"])
        )

    def _prompt_ids(self, sample: Sample, tokens: Sequence[int], name: str) -> list[int]:
        ids = self.tokenizer(self._text(sample, len(tokens)))["input_ids"]
        if ids.count(self.image_id) != len(tokens):
            raise DataError(
                f"the prompt of sample {name!r} does not have one place for each image",
                seen=f"{ids.count(self.image_id)} places, {len(tokens)} images; question {str(sample['question'])[:80]!r}",
                do="leave the image token out of the question",
            )
        limit = self.images.settings.max_text_tokens
        if limit is not None and len(ids) - len(tokens) > limit:
            raise DataError(
                f"the prompt of sample {name!r} is longer than max_text_tokens",
                seen=f"{len(ids) - len(tokens)} text tokens, max_text_tokens={limit}",
                do="raise max_text_tokens or leave the sample out; a cut question would be another question",
            )
        numbers = iter(tokens)
        return [i for one in ids for i in ([one] * next(numbers) if one == self.image_id else [one])]

    def _answer_ids(self, sample: Sample, number: int, name: str) -> list[int]:
        """Tokens of the answer as they follow the prompt; the prompt's own never depend on it."""
        if sample.get("answer") is None:
            raise DataError(
                f"sample {name!r} has no answer to learn", seen=f"keys {sorted(sample)}", do="give it an answer"
            )
        text = self._text(sample, number)
        answer = " " + str(sample["answer"])
        alone = self.tokenizer(text)["input_ids"]
        together = self.tokenizer(text + answer)["input_ids"]
        is_prefix = together[: len(alone)] == alone
        found = together[len(alone) :] if is_prefix else self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return [*found, *([] if self.end_id is None else [self.end_id])]


def mark_tokens(prompt: Sequence[int], answer: Sequence[int], image_id: int) -> dict[str, NDArray[Any]]:
    """What each token is. The question is the text of the prompt behind the last vision token."""
    ids = np.array([*prompt, *answer], dtype=np.int64)
    is_answer = np.arange(len(ids)) >= len(prompt)
    is_vision = (ids == image_id) & ~is_answer
    last = int(np.flatnonzero(is_vision)[-1]) if is_vision.any() else -1
    is_question = (np.arange(len(ids)) > last) & ~is_answer
    of_kind = {VISION: is_vision, QUESTION: is_question, TEXT: ~is_vision, ANSWER: is_answer}
    places = {f"{kind}_at": np.flatnonzero(is_of).astype(np.int64) for kind, is_of in of_kind.items()}
    return {"input_ids": ids, "is_vision": is_vision, "is_question": is_question, "is_answer": is_answer, **places}


def encoded_fields(family: Family, *, pad_id: int = 0) -> list[Field]:
    """How a micro-batch holds encoded samples."""
    cells = [Field(name="input_ids", pad=pad_id)]
    cells += [Field(name=name, dtype="bool") for name in ("is_vision", "is_question", "is_answer")]
    places = [Field(name=f"{kind}_at", axis=kind) for kind in _KINDS]
    counted = Field(name=IMAGE_TOKENS, kind="flat", axis="images", dtype="int64", host=True)
    return [*cells, *places, *family.fields, counted]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSamples:
    """A dataset of samples, encoded when they are read."""

    samples: Sequence[Sample]
    encoder: SampleEncoder

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, sample_id: int, /) -> dict[str, Any]:
        return self.encoder.encode(self.samples[sample_id])


def fixed_image_tokens(encoder: SampleEncoder) -> int | None:
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


def measure_tokens(encoder: SampleEncoder, samples: Sequence[Any]) -> Ints:
    """[N] tokens of every encoded sample."""
    fixed = fixed_image_tokens(encoder)
    if fixed is None:
        found = [len(encoder.encode(sample)["input_ids"]) for sample in samples]
    else:
        found = [encoder.count(sample, [fixed] * _num_images(sample.get("image"))) for sample in samples]
    return np.array(found, dtype=np.int64)


def _num_images(image: Any) -> int:
    return len(image) if isinstance(image, list | tuple) else int(image is not None)
