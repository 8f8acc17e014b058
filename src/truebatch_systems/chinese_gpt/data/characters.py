"""Chinese text before it is words: normal whitespace, and pieces of one kind of character.

text -> normalise -> runs of Han characters | runs of ASCII letters and digits | single other characters
"""

from __future__ import annotations

import re

HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Han characters with their extensions, as the inside of a character class."""
CHINESE = f"{HAN}\u3001-\u3003\u3008-\u3011\u3014-\u301f\uff00-\uffef\u2018-\u201d\u2026\u2014"
"""The same with Chinese punctuation: no blank stands between two of these."""

_BLANKS = re.compile(r"[^\S\n]+")
_LINE_ENDS = re.compile(r" ?\n[ \n]*")
_INSIDE_CHINESE = re.compile(f"(?<=[{CHINESE}]) (?=[{CHINESE}])")
_PIECES = re.compile(f"[{HAN}]+|[A-Za-z0-9]+|.", re.DOTALL)
_HAN_RUN = re.compile(f"[{HAN}]+")


def normalise(text: str) -> str:
    """One blank for blanks, one line end for line ends, none at the ends and none between Chinese characters.

    Everything else stays as it is: `decode(encode(text))` gives exactly this.
    """
    text = _BLANKS.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _INSIDE_CHINESE.sub("", _LINE_ENDS.sub("\n", text).strip())


def pieces_of(text: str) -> list[str]:
    """Runs of Han characters, runs of ASCII letters and digits, and every other character alone; joined, the text."""
    return _PIECES.findall(text)


def is_han(piece: str) -> bool:
    """Whether a piece is a run of Han characters."""
    return _HAN_RUN.fullmatch(piece) is not None
