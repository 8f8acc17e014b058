"""A conversation with images as token ids, placeholders expanded, with labels on its answers: from the headers of images.

record -> text of the template -> placeholders as long as the images need -> ids, labels, types, patches
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.hf.finetune.chat_template import answer_spans, label_answers, refuse_straddling
from truebatch.hf.finetune.record_formats import ANSWERING
from truebatch.hf.finetune.vision.image_source import ImageSource, source_size
from truebatch.hf.finetune.vision.placeholders import PlaceholderText, expand, is_prefix_processor, placeholder_of
from truebatch.hf.finetune.vision.records import ImageChat, read_image_record
from truebatch.hf.heads.losses import IGNORE


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImageChat:
    """One sample without its pixels."""

    columns: dict[str, list[int]]
    """input_ids, labels, and token_type_ids for models that read a prompt as a whole."""
    images: tuple[ImageSource, ...]
    patches: int
    place: str


@dataclass(frozen=True, slots=True, eq=False)
class ImageChatEncoder:
    """How records become samples of one processor."""

    processor: Any
    folder: Path
    """Where relative paths of images begin."""
    texts: PlaceholderText = field(init=False)

    def __post_init__(self) -> None:
        if not self.processor.tokenizer.is_fast:
            raise ConfigError(
                "finding answers needs a fast tokenizer",
                seen=f"{type(self.processor.tokenizer).__name__} has no character offsets",
                do="save it as a fast one (tokenizer.json)",
            )
        object.__setattr__(self, "texts", PlaceholderText(self.processor))

    def encode(self, sample: Any, place: str) -> EncodedImageChat:
        """One line of data; no pixel is decoded."""
        record = read_image_record(sample, place, self.folder)
        sizes = [source_size(image, place) for image in record.images]
        try:
            texts = [self.texts.of(size, is_single=len(sizes) == 1) for size in sizes]
            patches = sum(self.texts.units(size) for size in sizes)
        except (ValueError, ZeroDivisionError) as error:
            raise DataError(
                f"{place}: the processor of the model cannot take an image of this size",
                seen=f"{', '.join(f'{width} x {height}' for height, width in sizes)} pixels: {str(error)[:160]}",
                do="scale the image, or remove the record",
            ) from error
        columns = self._columns(record, texts, place)
        return EncodedImageChat(columns, record.images, patches, place)

    def _columns(self, record: ImageChat, texts: Sequence[str], place: str) -> dict[str, list[int]]:
        owner = templated_tokenizer(self.processor)
        if owner is None:
            return self._question_and_answer(record, texts, place)
        text, spans = answer_spans(owner, record.chat, place)
        whole, moved = expand(text, placeholder_of(self.processor), texts, place)
        spans = [tuple(at + sum(more for begin, more in moved if begin < at) for at in span) for span in spans]  # type: ignore[misc]
        encoded = self.processor.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        offsets = [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
        refuse_straddling(whole, offsets, spans, place)
        is_learned = [any(a <= start < end <= b for a, b in spans) for start, end in offsets]
        ids, labels = label_answers(encoded["input_ids"], is_learned, place)
        return {"input_ids": ids, "labels": labels}

    def _question_and_answer(self, record: ImageChat, texts: Sequence[str], place: str) -> dict[str, list[int]]:
        """Images, question, line end, answer: what a model without a chat template reads."""
        tokenizer = self.processor.tokenizer
        question, answer = _single_turn(record, place)
        begin = str(tokenizer.bos_token or "")
        if is_prefix_processor(self.processor):
            before = tokenizer("".join(texts) + begin + question + "\n", add_special_tokens=False)["input_ids"]
        else:
            before = tokenizer("".join(texts) + question + "\n")["input_ids"]
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        before = before[:-1] if before and before[-1:] == end else before
        after = [*tokenizer(answer, add_special_tokens=False)["input_ids"], *end]
        columns = {"input_ids": [*before, *after], "labels": [IGNORE] * len(before) + list(after)}
        if is_prefix_processor(self.processor):
            columns["token_type_ids"] = [0] * len(before) + [1] * len(after)
        return columns


def templated_tokenizer(processor: Any) -> Any:
    """The tokenizer with the chat template of its processor, which comes before its own; None without any.

    A processor of its own would look for images and videos in the messages while it writes them.
    """
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return None
    owner = copy.copy(processor.tokenizer)
    owner.chat_template = template
    return owner


def _single_turn(record: ImageChat, place: str) -> tuple[str, str]:
    roles = [message["role"] for message in record.chat.messages]
    if roles != ["user", ANSWERING]:
        raise DataError(
            f"{place}: the processor has no chat template for this conversation",
            seen=f"roles: {', '.join(roles)}",
            do="give a template with --set chat_template=FILE, or write one question and its answer",
        )
    asked, answer = ("".join(p.get("text", "") for p in m["content"]) for m in record.chat.messages)
    return asked, answer
