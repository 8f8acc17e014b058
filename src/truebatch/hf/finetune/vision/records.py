"""A line with images, in LLaVA's format or that of OpenAI's chat: who says what, and which image stands where.

image | images + conversations with <image>; messages with parts text, image, image_url -> ImageChat
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.hf.finetune.record_formats import ANSWERING, Chat, PromptCompletion, read_record
from truebatch.hf.finetune.vision.image_source import ImageSource, read_source

IMAGE = "<image>"
"""Where an image stands in a text; the one line end beside it belongs to it."""
_MARK = "\x00image\x00"
_WRITTEN = re.compile(r"<image>\n|\n<image>\Z|<image>")
_TURNS = ("messages", "conversations", "prompt", "completion")
_KEYS = "image or images, and conversations with <image> (LLaVA), or messages with parts of type text, image, image_url"


@dataclass(frozen=True, slots=True)
class ImageChat:
    """A conversation whose messages are lists of parts, and its images in the order of their places."""

    chat: Chat
    images: tuple[ImageSource, ...]


def read_image_record(sample: Any, place: str, folder: Path) -> ImageChat:
    """One line of data; what it lacks raises `DataError` with its file and line."""
    if not isinstance(sample, Mapping):
        raise DataError(f"{place} is not a JSON object", seen=f"{str(sample)[:60]!r}", do=f"a line holds {_KEYS}")
    given = [read_source(one, folder, place) for one in _listed(sample, place)]
    inline: list[Any] = []  # the image of every place; None for the next one of the list
    marked = {key: _marked(value, inline) if key in (*_TURNS, "instruction", "input") else value
              for key, value in sample.items() if key not in ("image", "images")}  # fmt: skip
    found = read_record("causal_lm", marked, place)
    if isinstance(found, PromptCompletion):
        messages = ({"role": "user", "content": found.prompt}, {"role": ANSWERING, "content": found.answer})
        found = Chat(messages)
    if not isinstance(found, Chat):
        raise DataError(
            f"{place} has no answer to learn from", seen=f"keys: {', '.join(sample)}", do=f"a line holds {_KEYS}"
        )
    if not inline and given:
        found, inline = _in_front(found, len(given)), [None] * len(given)
    sources = _matched(inline, given, folder, place)
    return ImageChat(replace(found, messages=tuple(_parts(message, place) for message in found.messages)), sources)


def _listed(sample: Mapping[str, Any], place: str) -> Sequence[Any]:
    both = [key for key in ("image", "images") if sample.get(key) is not None]
    if len(both) == 2:
        raise DataError(f"{place} lists its images twice", seen="keys image and images", do="keep one of them")
    value = sample[both[0]] if both else []
    return value if isinstance(value, list | tuple) else [value]


def _marked(value: Any, inline: list[Any]) -> Any:
    """The same conversation with texts for contents, in which every image is a mark."""
    if isinstance(value, str):
        text, number = _WRITTEN.subn(_MARK, value)
        inline += [None] * number
        return text
    if not isinstance(value, list):
        return value
    return [_marked_turn(turn, inline) if isinstance(turn, Mapping) else turn for turn in value]


def _marked_turn(turn: Mapping[str, Any], inline: list[Any]) -> dict[str, Any]:
    out = dict(turn)
    for key in ("content", "value"):
        if isinstance(out.get(key), list):
            texts = [_marked_part(part, inline) for part in out[key]]
            known = [text for text in texts if text is not None]
            out[key] = "".join(known) if len(known) == len(texts) else out[key]
        elif key in out:
            out[key] = _marked(out[key], inline)
    return out


def _marked_part(part: Any, inline: list[Any]) -> str | None:
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type", "text" if "text" in part else None)
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind not in ("image", "image_url", "input_image"):
        return None
    inline.append(next((part[key] for key in ("image_url", "image", "path", "url") if part.get(key)), None))
    return _MARK


def _in_front(chat: Chat, number: int) -> Chat:
    """Images that no place is given for stand before the first words of the user."""
    at = next((at for at, message in enumerate(chat.messages) if message["role"] == "user"), 0)
    message = chat.messages[at]
    moved = {**message, "content": _MARK * number + str(message["content"])}
    return replace(chat, messages=(*chat.messages[:at], moved, *chat.messages[at + 1 :]))


def _matched(inline: Sequence[Any], given: Sequence[ImageSource], folder: Path, place: str) -> tuple[ImageSource, ...]:
    waiting = sum(one is None for one in inline)
    if waiting != len(given):
        raise DataError(
            f"{place} has {waiting} places for images and {len(given)} images",
            seen=f"{waiting} x {IMAGE} (or a part of type image without a path), {len(given)} listed under image or images",
            do="write one <image> for every image, or none, and all stand before the first words of the user",
        )
    rest = iter(given)
    return tuple(next(rest) if one is None else read_source(one, folder, place) for one in inline)


def _parts(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A message whose content is a list of parts, as chat templates of processors read it."""
    content = str(message["content"])
    pieces = content.split(_MARK)
    if len(pieces) > 1 and message["role"] == ANSWERING:
        raise DataError(
            f"{place}: an answer holds an image, and a model that reads images writes none",
            seen=f"{IMAGE} in a message of the {ANSWERING}",
            do="move it into the question",
        )
    parts: list[dict[str, str]] = []
    for at, text in enumerate(pieces):
        parts += [{"type": "image"}] if at else []
        parts += [{"type": "text", "text": text}] if text or (at == 0 and len(pieces) == 1) else []
    return {**message, "content": parts}
