"""Prompts with images for a trained model: `<image:photo.jpg> What is this?`, laid out as its data was."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truebatch.generation.interface import Prompt, key_prompts
from truebatch.hf.finetune.chat_template import render_messages
from truebatch.hf.finetune.vision.encode import templated_tokenizer
from truebatch.hf.finetune.vision.image_source import source_pixels
from truebatch.hf.finetune.vision.placeholders import is_prefix_processor, placeholder_of

_NAMED = re.compile(r"<image:([^>]+)>")
_NOT_BESIDE = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels", "batch_num_images")


def image_prompts(processor: Any, texts: Sequence[str], seed: int) -> list[Prompt]:
    """Texts as prompts; an image stands where `<image:PATH>` does."""
    read = [_read(processor, text) for text in texts]
    keys = key_prompts(seed, [ids for ids, _ in read])
    return [Prompt(ids=ids, key=key, inputs=inputs) for (ids, inputs), key in zip(read, keys, strict=True)]


def _read(processor: Any, text: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    images = [source_pixels(Path(name), repr(text[:40])) for name in _NAMED.findall(text)]
    written = _written(processor, text)
    if not images:
        return tuple(processor.tokenizer(written, add_special_tokens=False)["input_ids"]), {}
    made = processor(text=[written], images=[images], return_tensors="pt", **_without_special_tokens(processor))
    inputs = {name: value for name, value in made.items() if name not in _NOT_BESIDE}
    return tuple(made["input_ids"][0].tolist()), inputs


def _written(processor: Any, text: str) -> str:
    owner = templated_tokenizer(processor)
    if owner is None:
        mark = placeholder_of(processor)
        words = mark * len(_NAMED.findall(text)) + _NAMED.sub("", text)
        return words if is_prefix_processor(processor) else words + "\n"
    parts: list[dict[str, str]] = []
    for at, piece in enumerate(_NAMED.split(text)):
        if at % 2:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return render_messages(owner, [{"role": "user", "content": parts}], "the prompt")


def _without_special_tokens(processor: Any) -> dict[str, bool]:
    """A template writes its special tokens itself; without one the tokenizer begins a text as it does in training."""
    return {} if templated_tokenizer(processor) is None else {"add_special_tokens": False}
