"""A sample as the tokens and pixels a model takes: the chat template, the processor, and what both will cost.

ScoreRequest -> messages -> text -> ids, with image placeholders expanded -> ImagePrompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch.errors import ConfigError
from truebatch.generation.interface import key_prompts
from truebatch.hf.generate.image_cache import ImagePrompt
from truebatch.hf.template_sandbox import apply_template
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest
from truebatch.scoring.inputs.images import image_sizes, open_image
from truebatch.scoring.store.content_key import image_hash

MOST = "max_new_tokens"
_NOT_BESIDE = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """How samples become prompts of one model."""

    processor: Any
    """A tokenizer, or a processor with one and an image processor."""
    max_length: int | None
    new_tokens: int
    """That a sample may need behind its prompt."""
    options: frozenset[str] = frozenset()
    """What a sample may ask for itself."""
    prefix: str = ""
    """How every answer begins."""
    seed: int = 0

    @property
    def tokenizer(self) -> Any:
        """The tokenizer itself."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def has_template(self) -> bool:
        """Whether samples are rendered as conversations."""
        return bool(getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None))

    def cost(self, sample: ScoreRequest) -> Cost:
        """Tokens and patches from the text and the headers of the images; no pixel is decoded."""
        self._check_options(sample)
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        ids = self._text_ids(self.render(sample))
        if not sample.images:
            return self._checked(sample, Cost(tokens=len(ids), new_tokens=self.new_tokens))
        if count is None:  # then only the processor itself knows
            return Cost(tokens=len(self.prepare(sample).ids), new_tokens=self.new_tokens)
        found = count(image_sizes=image_sizes(sample.images))
        tokens = len(ids) - len(sample.images) + sum(found.num_image_tokens)
        patches = sum(found.num_image_patches or ())
        return self._checked(sample, Cost(tokens=tokens, new_tokens=self.new_tokens, patches=patches))

    def prepare(self, sample: ScoreRequest) -> ImagePrompt:
        """The prompt with its pixels; what is wrong with the sample raises `SampleError`."""
        self._check_options(sample)
        text = self.render(sample)
        if not sample.images:
            ids, beside = self._text_ids(text), dict[str, Any]()
        else:
            ids, beside = self._with_images(text, [open_image(image) for image in sample.images])
        if not ids:
            raise SampleError("prepare", "empty_prompt", f"{sample.id} has no tokens")
        self._checked(sample, Cost(tokens=len(ids)))
        hashes = tuple(image_hash(image) for image in sample.images)
        (key,) = key_prompts(self.seed, [ids])
        most = sample.options.get(MOST)
        return ImagePrompt(ids=tuple(ids), key=key, inputs=beside, image_hashes=hashes, max_new_tokens=most)

    def render(self, sample: ScoreRequest) -> str:
        """The text of a sample, ready for an answer."""
        messages = _messages(sample, with_parts=hasattr(self.processor, "image_processor"))
        if not self.has_template:
            image = getattr(self.processor, "image_token", "")
            return image * len(sample.images) + "\n".join(_words(m) for m in messages) + self.prefix
        owner = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        is_open = messages[-1]["role"] != "assistant"
        try:
            text = apply_template(owner, messages, tokenize=False, add_generation_prompt=is_open)
        except Exception as error:  # a template is code of others and may raise anything
            raise SampleError("prepare", "template", f"{sample.id}: {type(error).__name__}: {error}") from error
        return str(text) + self.prefix

    def _check_options(self, sample: ScoreRequest) -> None:
        unknown = sorted(set(sample.options) - self.options)
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise SampleError("prepare", "unknown_option", f"{sample.id}: {', '.join(unknown)}; there are: {known}")
        most = sample.options.get(MOST, 1)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise SampleError("prepare", "wrong_option", f"{sample.id}: {MOST}={most!r}, a number from 1 is needed")

    def _text_ids(self, text: str) -> list[int]:
        # A template writes its special tokens itself. A tokenizer may have been saved with a length to cut at.
        return list(self.tokenizer(text, add_special_tokens=not self.has_template, truncation=False)["input_ids"])

    def _with_images(self, text: str, pictures: Sequence[Any]) -> tuple[list[int], dict[str, Any]]:
        if not hasattr(self.processor, "image_processor"):
            raise ConfigError(
                "samples have images, and this model takes none",
                seen=f"{type(self.processor).__name__}",
                do="use a vision-language model with its processor",
            )
        found = self.processor(text=[text], images=list(pictures), return_tensors="pt")
        return found["input_ids"][0].tolist(), {name: v for name, v in found.items() if name not in _NOT_BESIDE}

    def _checked(self, sample: ScoreRequest, cost: Cost) -> Cost:
        if self.max_length is not None and cost.tokens + self.new_tokens > self.max_length:
            message = (
                f"{sample.id}: {cost.tokens:,} tokens and {self.new_tokens} new ones, {self.max_length:,} positions"
            )
            raise SampleError("prepare", "too_long", message)
        return cost


def label_tokens(tokenizer: Any, labels: Sequence[str], prefix: str) -> dict[str, list[int]]:
    """The tokens of each label where it will stand: behind the prefix, or behind the line that opens an answer."""
    before = prefix or "\n"
    start = list(tokenizer(before, add_special_tokens=False)["input_ids"])
    out = {}
    for label in labels:
        ids = list(tokenizer(before + label, add_special_tokens=False)["input_ids"])
        if ids[: len(start)] != start:
            raise ConfigError(
                f"the label {label!r} is not read behind the prefix {prefix!r}",
                seen=f"together they are {ids}, the prefix alone is {start}",
                do="move the white space from the end of the prefix to the beginning of the labels, or back",
            )
        out[label] = ids[len(start) :]
    return out


def _messages(sample: ScoreRequest, *, with_parts: bool) -> list[dict[str, Any]]:
    """The conversation of a sample; images without a place stand before the first words of the user."""
    given: list[dict[str, Any]] = [dict(message) for message in sample.messages]
    if not given:
        given = [{"role": "system", "content": sample.system}] if sample.system else []
        given.append({"role": "user", "content": sample.user})
    if not with_parts:
        return [{**message, "content": _words(message)} for message in given]
    placed = sum(
        part.get("type") == "image" for m in given if not isinstance(m["content"], str) for part in m["content"]
    )
    missing = len(sample.images) - placed
    if missing < 0:
        raise SampleError("prepare", "wrong_images", f"{sample.id} names {placed} images and has {len(sample.images)}")
    out = []
    for message in given:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if missing and message["role"] == "user":
            parts, missing = [{"type": "image"}] * missing + parts, 0
        out.append({**message, "content": parts})
    if missing:
        raise SampleError("prepare", "wrong_images", f"{sample.id} has images but no user message")
    return out


def _words(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content)
