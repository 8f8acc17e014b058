"""What the judge is asked: a system text and a template a category, one message builder for every backend."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch.errors import ConfigError
from truebatch_systems.vl_reward.data.dataset import EditPair, Fault, plain_category

VARIABLES = ("original_description", "edit_instruction", "rationale")


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryPrompt:
    """The question about one category."""

    system_prompt: str
    user_prompt_template: str


def prompt_faults(prompts: Mapping[str, CategoryPrompt], categories: Sequence[str]) -> Iterator[Fault]:
    """What is wrong with the prompts: a category without one, a template that cannot be filled."""
    known = {plain_category(name) for name in prompts}
    for name in dict.fromkeys(categories):
        if plain_category(name) not in known:
            yield Fault(None, f"the category {name!r} has no prompt")
    first: dict[str, str] = {}
    for name, prompt in prompts.items():
        if first.setdefault(plain_category(name), name) != name:
            yield Fault(None, f"{name!r} and {first[plain_category(name)]!r} are prompts for one category")
        words = _template_fault(prompt.user_prompt_template)
        if words:
            yield Fault(None, f"the template of {name!r}: {words}")


def prompt_of(prompts: Mapping[str, CategoryPrompt], category: str) -> CategoryPrompt:
    """The prompt of a category, whichever of its names is used."""
    for name, prompt in prompts.items():
        if plain_category(name) == plain_category(category):
            return prompt
    raise ConfigError(
        f"the category {category!r} has no prompt", seen=f"prompts for {', '.join(prompts) or 'none'}", do="add one"
    )


def fill_prompt(prompt: CategoryPrompt, pair: EditPair) -> str:
    """The user text for a pair."""
    values = {
        "original_description": pair.description, "edit_instruction": pair.instruction, "rationale": pair.rationale
    }  # fmt: skip
    try:
        return prompt.user_prompt_template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the template of category {pair.category!r} cannot be filled",
            seen=_template_fault(prompt.user_prompt_template) or str(error),
            do=f"use {', '.join('{' + name + '}' for name in VARIABLES)}, and double literal braces",
        ) from error


def build_messages(system: str, user: str, captions: Sequence[str]) -> list[dict[str, Any]]:
    """The conversation, the same for every backend: a system turn, then one user turn with the images and the text.

    A caption stands before each image; an empty one shows the image alone.
    """
    parts: list[dict[str, Any]] = []
    for caption in captions:
        parts += [{"type": "text", "text": caption}] if caption else []
        parts.append({"type": "image"})
    parts.append({"type": "text", "text": user})
    first = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    return [*first, {"role": "user", "content": parts}]


def _template_fault(template: str) -> str:
    try:
        parsed = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        return f"{error}; literal braces are written twice"
    fields = [str(name) for _, name, _, _ in parsed]
    shaped = next((name for _, name, shape, turned in parsed if shape or turned), None)
    if shaped in VARIABLES:
        return f"{{{shaped}}} takes no format; literal braces are written twice"
    unknown = [name for name in fields if name not in VARIABLES]
    return f"unknown variable {{{unknown[0]}}}; literal braces are written twice" if unknown else ""
