"""The scale on which an answer is read: what kind of value is asked for, and its ends."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from truebatch.errors import ConfigError

Kind = Literal["number", "yes_no", "pair"]
KINDS = ("number", "yes_no", "pair")
_ENDS = re.compile(r"\s*(?P<least>[-+]?\d+(?:\.\d+)?)\s*(?:\.\.|:)\s*(?P<most>[-+]?\d+(?:\.\d+)?)\s*")


@dataclass(frozen=True, slots=True)
class Scale:
    """What an answer is asked for."""

    kind: Kind = "number"
    """A number, yes or no, or two numbers."""
    least: float = 0.0
    most: float = 10.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or not self.least < self.most:
            raise ConfigError(
                "a scale has a kind, and a lower end below its upper end",
                seen=f"kind={self.kind!r}, {self.least:g}..{self.most:g}",
                do="write 0..10, and a kind of number, yes_no or pair",
            )

    @property
    def is_bounded(self) -> bool:
        """False if any number is on the scale; an answer that names a scale of its own is then not readable."""
        return math.isfinite(self.least) and math.isfinite(self.most)

    def __contains__(self, number: float) -> bool:
        return math.isfinite(number) and self.least <= number <= self.most


ANY_NUMBER = Scale("number", -math.inf, math.inf)
"""No declared ends."""


def parse_scale(text: str) -> Scale:
    """`0..10` as a scale; an empty text as any number."""
    if not text.strip():
        return ANY_NUMBER
    found = _ENDS.fullmatch(text)
    if found is None:
        raise ConfigError("a scale is its two ends", seen=f"--scale {text}", do="write 0..10, 1..5 or -5..5")
    return Scale("number", float(found["least"]), float(found["most"]))
