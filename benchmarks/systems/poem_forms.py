"""What can be counted of the form of a Tang poem: equal lines, how many, and whether the second, fourth ... rhyme.

text -> lines -> equal lengths | rhymes of the lines at even places, by the fourteen groups of modern Chinese
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

LINE_ENDS = re.compile("[，。！？；、\n]+")
GROUPS = (
    ("支", "[zcs]h?i|ri"), ("姑", ".*[^ioqjxy]u"), ("麻", ".*a"), ("豪", ".*ao"), ("皆", ".*[iuvü]e|ye"),
    ("波", ".*[eo]"), ("开", ".*ai"), ("微", ".*[eu]i"), ("尤", ".*[oi]u"), ("寒", ".*an"), ("文", ".*[eiuvü]n"),
    ("唐", ".*ang"), ("庚", ".*[eio]ng"), ("齐", ".*i|er|.*[jqxy]u|.*[vü]"),
)  # fmt: skip
"""The rhymes of the new rhyme book (中华新韵), as patterns of a syllable without its tone; the first that fits counts."""
Readings = Callable[[str], Iterable[str]]
"""The syllables of a character, without tones."""


def lines_of(text: str) -> list[str]:
    """The lines of a poem, without the marks between them."""
    return [line for line in LINE_ENDS.split(text.strip()) if line]


def is_regular(text: str) -> bool:
    """Four or eight lines, all of five or all of seven characters."""
    lines = lines_of(text)
    return len(lines) in (4, 8) and len({len(line) for line in lines}) == 1 and len(lines[0]) in (5, 7)


def group_of(syllable: str) -> str:
    """The rhyme of a syllable, or the syllable itself."""
    return next((name for name, pattern in GROUPS if re.fullmatch(pattern, syllable)), syllable)


def rhyme_groups(character: str, readings: Readings) -> set[str]:
    """The rhymes of all readings of a character."""
    return {group_of(syllable) for syllable in readings(character)}


def do_rhyme(lines: Sequence[str], readings: Readings) -> bool:
    """True where the lines at even places end in one rhyme, and not all in one character."""
    ends = [line[-1] for line in lines[1::2]]
    shared = set.intersection(*(rhyme_groups(end, readings) for end in ends)) if ends else set()
    return len(set(ends)) > 1 and bool(shared)


def count_forms(texts: Sequence[str], readings: Readings) -> dict[str, float]:
    """Shares of all texts: poems of a regular form, and those that rhyme as well; of all regular ones, those that rhyme."""
    regular = [lines_of(text) for text in texts if is_regular(text)]
    rhyming = sum(do_rhyme(lines, readings) for lines in regular)
    return {
        "texts": len(texts),
        "regular": len(regular) / max(len(texts), 1),
        "rhyming": rhyming / max(len(texts), 1),
        "rhyming_of_regular": rhyming / max(len(regular), 1),
    }
