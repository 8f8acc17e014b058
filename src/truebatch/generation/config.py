"""Generation settings: which tokens are allowed, which one is chosen, and when a text ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from truebatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Settings of one generation; the same for all its prompts."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """Below 1 prefers likely tokens; 0 always takes the likeliest (greedy)."""
    top_k: int = 0
    """Only the k likeliest tokens are allowed; 0 allows all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are allowed; with top_k, both must allow a
    token."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that were there already less likely."""
    beams: int = 1
    """Number of beams; above 1 it searches for the likeliest text without sampling."""
    length_penalty: float = 1.0
    """A beam's score is its log-probability divided by its length to this power."""
    seed: int = 0
    """Draws are keyed by seed, prompt and position: neighbours and order never change them."""
    stop: tuple[str, ...] = ()
    """Texts that end a generation; they are not part of it."""

    def __post_init__(self) -> None:
        _check("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more")
        _check("temperature", self.temperature, self.temperature >= 0, "0 or more")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (all) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0")
        _check("beams", self.beams, self.beams >= 1, "1 or more")
        _check("length_penalty", self.length_penalty, True, "a finite number")
        if self.beams > 1 and self.temperature not in (0, 1):
            raise ConfigError(
                "a beam search does not sample, so it has no temperature",
                seen=f"beams={self.beams}, temperature={self.temperature}",
                do="leave temperature at 1, or sample with beams=1",
            )
        _check("stop", self.stop, all(self.stop), "texts of at least one character")


def _check(name: str, value: object, is_right: bool, rule: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_right or (is_number and not math.isfinite(value)):  # type: ignore[arg-type]
        raise ConfigError(f"{name} is out of range", seen=f"{name}={value!r}", do=f"give {rule}")
