"""Stop criteria: an end token, a stop text, or no more room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from truebatch.errors import ConfigError
from truebatch.generation.config import Generation
from truebatch.generation.interface import Ended, Prompt
from truebatch.generation.token_trie import TokenTrie

Read = Callable[[Sequence[int]], str]
"""Tokens -> text; more tokens only make it longer, except for an incomplete character at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endings:
    """What ends a text; the same for all prompts of a generation."""

    end_ids: frozenset[int]
    max_length: int | None
    settings: Generation
    read: Read | None
    choices: TokenTrie | None = None
    """The only texts that are allowed; None: any."""

    def __post_init__(self) -> None:
        if self.settings.stop and self.read is None:
            raise ConfigError(
                "stop texts need text, but the caller decodes no tokens",
                seen=f"stop={self.settings.stop}",
                do="give `read`, which turns tokens into text",
            )

    def room(self, prompt: Prompt) -> tuple[int, Ended]:
        """Maximum number of new tokens of this prompt, and the reason for the limit."""
        own = prompt.max_new_tokens
        length = self.settings.max_new_tokens if own is None else min(own, self.settings.max_new_tokens)
        room = length if self.max_length is None else self.max_length - len(prompt.ids)
        return (length, "length") if length <= room else (room, "room")

    def after(self, prompt: Prompt, new: Sequence[int]) -> Ended | None:
        """Why the text ends with the last of these new tokens; None if it continues."""
        if self.choices is not None and self.choices.is_whole(new):
            return "stop"
        if new[-1] in self.end_ids:
            return "end"
        if self.settings.stop and self.read is not None and find_stop(self.read(new), self.settings.stop) is not None:
            return "stop"
        most, why = self.room(prompt)
        return why if len(new) >= most else None


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop text begins; None if there is none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found) if found else None
