"""A message in Chinese: found by its English sentence, whose holes take what stands in the message.

The code says plain English. What it says is looked up where it leaves the program, in the catalogues `zh/*.json` of
this room: each maps an English sentence with numbered holes, `{0} samples are longer than {1}`, to a Chinese one. What
no catalogue has stays English; nothing that is said can be lost or make this fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from truebatch.language.choosing import language

CATALOGUES = Path(__file__).parent / "zh"
HOLE = re.compile(r"\{(\d+)\}")
WORD = re.compile(r"[A-Za-z]+")
JOINTS = (("; ", "；"), (": ", "："), (", ", "，"))
"""Where a message was put together from sentences, each of them may be known."""
DEEPEST = 3
"""Messages in holes of messages: what was wrong inside of what was being done."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """An English sentence cut at its holes, and the Chinese one."""

    pieces: tuple[str, ...]
    words: frozenset[str]
    holes: tuple[int, ...]
    chinese: str

    @property
    def letters(self) -> int:
        """How much of it is certain: of two that match, the one with more is meant."""
        return sum(len(piece) for piece in self.pieces)

    def match(self, text: str) -> list[str] | None:
        """What stands in the holes, or None; each piece where it first occurs, in time linear in the text."""
        first, *middle = self.pieces
        if not middle:
            return [] if text == first else None
        last = middle.pop()
        if not text.startswith(first) or not text.endswith(last):
            return None
        found, at, end = [], len(first), len(text) - len(last)
        for piece in middle:
            start = text.find(piece, at, end)
            if start < 0:
                return None
            found.append(text[at:start])
            at = start + len(piece)
        return [*found, text[at:end]] if at <= end else None


def in_words(text: str) -> str:
    """The text in the language of the person: as it is, or line by line in Chinese."""
    return text if language() == "en" else in_chinese(text)


def in_chinese(text: str) -> str:
    """Every line that is known, in Chinese; spaces around it and all other lines as they are."""
    whole = _known(text, depth=0)
    return whole if whole is not None else "\n".join(_line(line) for line in text.split("\n"))


def _line(line: str) -> str:
    said = line.strip()
    if not said:
        return line
    start = line.index(said)
    return line[:start] + _sentence(said, depth=0) + line[start + len(said) :]


def _sentence(text: str, *, depth: int) -> str:
    known = _known(text, depth=depth)
    if known is not None:
        return known
    for joint, chinese in JOINTS:
        parts = text.split(joint)
        said = [_known(part, depth=depth + 1) if len(parts) > 1 else None for part in parts]
        if any(said):
            both = zip(parts, said, strict=True)
            return chinese.join(_sentence(part, depth=depth + 1) if new is None else new for part, new in both)
    return text


def _known(text: str, *, depth: int) -> str | None:
    exact, open_ones = catalogue()
    if text in exact:
        return exact[text]
    if depth > DEEPEST:
        return None
    words = set(WORD.findall(text))
    matching = ((sentence, sentence.match(text)) for sentence in open_ones if sentence.words <= words)
    sentence, found = max(
        ((one, values) for one, values in matching if values is not None),
        key=lambda pair: pair[0].letters,
        default=(None, None),
    )
    if sentence is None or found is None:
        return None
    values = {hole: _value(value, depth=depth + 1) for hole, value in zip(sentence.holes, found, strict=True)}
    return HOLE.sub(lambda hole: values[int(hole[1])], sentence.chinese)


def _value(value: str, *, depth: int) -> str:
    """A value as it is; a sentence in Chinese. One word is a value: names of settings are typed as they are."""
    return _sentence(value, depth=depth) if " " in value.strip() else value


@cache
def catalogue() -> tuple[dict[str, str], tuple[Sentence, ...]]:
    """Sentences without holes by their text, and those with holes."""
    exact: dict[str, str] = {}
    open_ones = []
    for english, chinese in _entries():
        pieces, holes = cut(english)
        if holes:
            words = frozenset(word for piece in pieces for word in whole_words(piece))
            open_ones.append(Sentence(pieces, words, holes, chinese))
        else:
            exact[english] = chinese
    return exact, tuple(open_ones)


def cut(english: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The pieces between the holes, and the numbers of the holes."""
    parts: Sequence[str] = HOLE.split(english)
    return tuple(parts[::2]), tuple(int(number) for number in parts[1::2])


def whole_words(piece: str) -> list[str]:
    """The words that stand whole in a piece: one at its edge may go on in what fills the hole."""
    found = WORD.finditer(piece)
    return [word[0] for word in found if word.start() > 0 and word.end() < len(piece)]


def _entries() -> Iterator[tuple[str, str]]:
    for path in sorted(CATALOGUES.glob("*.json")):
        yield from json.loads(path.read_text(encoding="utf-8")).items()
