"""The text that stands for an image in a prompt, as the model's own processor writes it, without decoding the image.

size -> the processor's count, where that was seen to fit -> text; else a blank image of the size through the processor
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from truebatch.errors import ConfigError, DataError

Size = tuple[int, int]
_CALIBRATED = 3
"""Sizes whose count is compared with what the processor writes, before it is believed for others."""
_MOST_KNOWN = 4096
"""Texts that are kept."""


class Repeated(NamedTuple):
    """A text made of one token many times between two ends."""

    before: str
    token: str
    behind: str
    more: int
    """Tokens beside those that the processor counts."""


class PlaceholderText:
    """Texts of images by their size. A sample of several images may write them in another way than one of a single one."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._known: dict[tuple[bool, Size], str] = {}
        self._rules: dict[bool, Repeated | None] = {}

    def of(self, size: Size, *, is_single: bool) -> str:
        """What the placeholder of an image of (height, width) becomes."""
        key = (is_single, size)
        if key not in self._known:
            counted = self._counted(size, is_single)
            if counted is not None:
                return counted
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = self._asked(size, is_single)
        return self._known[key]

    def units(self, size: Size) -> int:
        """Patches (or tiles) of an image as its processor counts them; 1 where it does not."""
        found = getattr(_count(self._processor, size), "num_image_patches", None)
        return int(found[0]) if found else 1

    def _asked(self, size: Size, is_single: bool) -> str:
        from PIL import Image

        mark = placeholder_of(self._processor)
        blank = Image.new("RGB", (size[1], size[0]))
        number = 1 if is_single else 2
        text = written_text(self._processor, mark * number, [blank] * number)
        return text[: len(text) // number]

    def _counted(self, size: Size, is_single: bool) -> str | None:
        """From the processor's own count, once it was seen to say what the processor writes."""
        seen = {one: text for (single, one), text in self._known.items() if single == is_single}
        if is_single not in self._rules:
            if len(seen) < _CALIBRATED:
                return None
            self._rules[is_single] = _rule_of(self._processor, seen)
        rule, found = self._rules[is_single], _count(self._processor, size)
        if rule is None or found is None:
            return None
        return rule.before + rule.token * (int(found.num_image_tokens[0]) + rule.more) + rule.behind


def placeholder_of(processor: Any) -> str:
    """The token that stands for an image in a text before its processor has seen the image."""
    for owner in (processor, getattr(processor, "tokenizer", None)):
        found = getattr(owner, "image_token", None)
        if found is not None:
            return str(getattr(found, "content", found))
    raise ConfigError(
        f"{type(processor).__name__} does not say which token stands for an image",
        seen="no image_token",
        do="save the processor again with the transformers that is installed",
    )


class _Listener:
    """A tokenizer that keeps the texts it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.heard = tokenizer, list[str]()

    def __call__(self, text: Any, **settings: Any) -> Any:
        self.heard.append(text if isinstance(text, str) else text[0])
        return self.tokenizer(text, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def written_text(processor: Any, text: str, images: Sequence[Any]) -> str:
    """The text that the processor gives its tokenizer: placeholders have become as many as their images need."""
    twin = copy.copy(processor)
    listener = _Listener(processor.tokenizer)
    twin.tokenizer = listener
    twin(text=[text], images=[list(images)], return_tensors="pt")
    heard = max(listener.heard, key=len)  # some also count the tokens of short texts
    if not is_prefix_processor(processor):
        return heard
    return heard.removesuffix(f"{processor.tokenizer.bos_token}\n")


def is_prefix_processor(processor: Any) -> bool:
    """Whether a prompt is read as a whole (PaliGemma): its processor writes the start and the end of the prompt itself."""
    return type(processor).__name__.startswith("PaliGemma")


def _count(processor: Any, size: Size) -> Any:
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    if count is None:
        return None
    try:
        return count(image_sizes=[size])
    except (AttributeError, KeyError, TypeError):  # written for another image processor than the folder has
        return None


def _rule_of(processor: Any, seen: dict[Size, str]) -> Repeated | None:
    """How these texts follow from the count of their sizes; None where they do not."""
    rules = set()
    tokens = {placeholder_of(processor), str(getattr(processor.tokenizer, "image_token", "") or "")} - {""}
    for size, text in seen.items():
        token = max(tokens, key=text.count)
        before, behind = text[: text.find(token)], text[text.rfind(token) + len(token) :]
        number, found = text.count(token), _count(processor, size)
        if found is None or text != before + token * number + behind:
            return None
        rules.add(Repeated(before, token, behind, number - int(found.num_image_tokens[0])))
    return rules.pop() if len(rules) == 1 else None


def expand(text: str, mark: str, texts: Sequence[str], place: str) -> tuple[str, list[tuple[int, int]]]:
    """The text with every mark replaced, and (where a mark began, how much longer the text became) for each."""
    pieces = text.split(mark)
    if len(pieces) - 1 != len(texts):
        raise DataError(
            f"{place}: the chat template writes {len(pieces) - 1} placeholders for {len(texts)} images",
            seen=f"it should write {mark!r}, and writes {text[:160]!r}",
            do="give a chat template that writes one for every part of type image, with --set chat_template=FILE",
        )
    out, moved, at = [pieces[0]], [], len(pieces[0])
    for new, piece in zip(texts, pieces[1:], strict=True):
        out += [new, piece]
        moved.append((at, len(new) - len(mark)))
        at += len(mark) + len(piece)
    return "".join(out), moved
