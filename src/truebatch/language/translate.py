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

from truebatch.language.locale import language

CATALOGUES = Path(__file__).parent / "zh"
HOLE = re.compile(r"\{(\d+)\}")
_PLACE = re.compile(r"((?<=[^\x00-\x7f]) |)\{(\d+)\}( (?=[^\x00-\x7f])|)")
"""A hole, with the space that parts it from Chinese on either side."""
LABELS = {"error: ": "错误：", "seen: ": "看到：", "do:   ": "怎么办："}
"""Of the three parts of an error."""
_SIGNS = "（，。；："
WORD = re.compile(r"[A-Za-z]+")
_SPACED_WORDS = re.compile(r"[^,\s] \S")
WEAK = 8
"""A sentence of fewer letters that begins with a hole."""
JOINTS = (("; ", "；"), (": ", "："), (", ", "，"))
"""Where a message was put together from sentences, each of them may be known."""
MOST_JOINTS = 40
"""More of them part a list of values, not sentences."""
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

    def allows(self, values: Sequence[str]) -> bool:
        """A word between two holes, such as `{0} with {1}`, stands in any text: it is meant only between names."""
        is_weak = not self.pieces[0] and self.letters < WEAK
        return not (is_weak and any(_SPACED_WORDS.search(value) for value in values))


def in_words(text: str) -> str:
    """The text in the language of the person: as it is, or line by line in Chinese."""
    return text if language() == "en" else in_chinese(text)


def in_chinese(text: str) -> str:
    """Every line that is known, in Chinese; spaces around it and all other lines as they are."""
    said = "\n".join(_spaced(line, depth=0) for line in text.split("\n"))
    whole = _known(text, depth=0) if said == text else None
    return said if whole is None else whole


def _spaced(text: str, *, depth: int) -> str:
    """A sentence in Chinese; spaces around it as they are, but none before a full-width sign."""
    core = text.strip()
    if not core:
        return text
    label = "" if depth else next((label for label in LABELS if core.startswith(label)), "")
    if label:
        before, rest = text.split(label, 1)
        return before + LABELS[label] + _spaced(rest, depth=depth)
    start, said = text.index(core), _sentence(core, depth=depth)
    return (text[:start] if said[0] not in _SIGNS or not depth else "") + said + text[start + len(core) :]


def _sentence(text: str, *, depth: int) -> str:
    if depth and " " not in text.strip():
        return text
    known = _one_after_another(text, depth=depth) or _known(text, depth=depth)
    if known is not None:
        return known
    if "  " in text:
        return _columns(text, depth=depth)
    if text[0] == "(" and text[-1] == ")":
        inner = _sentence(text[1:-1], depth=depth + 1)
        return text if inner == text[1:-1] else f"（{inner}）"
    for joint, chinese in JOINTS:
        first, *rest = text.split(joint)
        if len(rest) > MOST_JOINTS:
            continue
        parts = [_words(first, depth=depth + 1), *(_joined(part, joint, chinese, depth=depth + 1) for part in rest)]
        if any(parts):
            texts = zip([first, *rest], ["", *[chinese] * len(rest)], parts, strict=True)
            return "".join(new or sign + _sentence(old, depth=depth + 1) for old, sign, new in texts)
    return text


def _columns(text: str, *, depth: int) -> str:
    """What stands in columns, each where it stood as far as there is room; a Chinese character takes two."""
    said = ""
    for part, gap in re.findall(r"(\S+(?: \S+)*)( *)", text):
        new = _sentence(part, depth=depth + 1)
        wider = sum(not character.isascii() for character in new) + len(new) - len(part)
        said += new + (" " * max(2, len(gap) - wider) if len(gap) > 2 else gap)
    return said


def _one_after_another(text: str, *, depth: int) -> str | None:
    """Sentences joined by `; `, where they are known better alone: a hole of one must not swallow the others."""
    parts = text.split("; ")
    if not 1 < len(parts) <= MOST_JOINTS:
        return None
    certain = [_certain(part) for part in parts if part != "..."]
    if not all(certain) or sum(certain) <= _certain(text):
        return None
    return "；".join(_sentence(part, depth=depth + 1) for part in parts)


def _certain(text: str) -> int:
    """How much of a text is known, in letters: the sentence, and what stands in its holes word for word."""
    if text in catalogue()[0]:
        return len(text)
    sentence, values = _best(text)
    return 0 if sentence is None or values is None else _known_letters(sentence, values)


def _known_letters(sentence: Sentence, values: Sequence[str]) -> int:
    """Letters of a sentence, and of what stands in its holes and is known word for word."""
    exact, _ = catalogue()
    return sentence.letters + sum(len(value) for value in values if value in exact)


def _joined(part: str, joint: str, chinese: str, *, depth: int) -> str | None:
    """What follows a joint, with its sign: a sentence, or a fragment that is known with the joint before it."""
    if " " not in part.strip():
        return None
    words = _known(part, depth=depth)
    return chinese + words if words is not None else _known(joint + part, depth=depth)


def _words(text: str, *, depth: int) -> str | None:
    """One word is a value: names of settings are typed as they are."""
    return _known(text, depth=depth) if " " in text.strip() else None


def _known(text: str, *, depth: int) -> str | None:
    exact, _ = catalogue()
    if text in exact:
        return exact[text]
    if depth > DEEPEST:
        return None
    sentence, found = _best(text)
    if sentence is None or found is None:
        return None
    given = dict(zip(sentence.holes, found, strict=True))
    return _PLACE.sub(lambda place: _filled(place, given[int(place[2])], depth=depth + 1), sentence.chinese)


def _best(text: str) -> tuple[Sentence | None, list[str] | None]:
    """Of the sentences with holes that a text can be, the one of which most is known, and what stands in its holes."""
    words = set(WORD.findall(text))
    matching = ((sentence, sentence.match(text)) for sentence in catalogue()[1] if sentence.words <= words)
    return max(
        ((one, values) for one, values in matching if values is not None and one.allows(values)),
        key=lambda pair: _known_letters(*pair),
        default=(None, None),
    )


def _filled(place: re.Match[str], value: str, *, depth: int) -> str:
    """A value as it is, with the spaces around its hole; where it became Chinese, without them."""
    said = _spaced(value, depth=depth) if " " in value.strip() else value
    is_chinese = said != value
    before, after = is_chinese and not said[0].isascii(), is_chinese and not said[-1].isascii()
    return ("" if before else place[1]) + said + ("" if after else place[3])


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
