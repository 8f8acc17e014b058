"""Numbers written as words, in English and Chinese, as digits: `seven and a half` -> 7.5, 八点五 -> 8.5."""

from __future__ import annotations

import re

_SMALL_WORDS = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|"
    "sixteen|seventeen|eighteen|nineteen"
)
_SMALL = _SMALL_WORDS.split("|")
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {word: number for number, word in enumerate(_SMALL)} | {
    word: 10 * number for number, word in enumerate(_TENS, start=2)
}
_HANZI = {char: number for number, char in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_WORD = "|".join(sorted(_VALUES, key=len, reverse=True))
_UNIT = "|".join(_SMALL[1:10])
ENGLISH = rf"(?:(?:{_WORD})(?:-(?:{_UNIT}))?(?:\s+(?:point\s+(?:{_WORD})|and\s+a\s+half))?|one\s+hundred)"
CHINESE = r"[零〇一二两三四五六七八九十百]+(?:点[零〇一二三四五六七八九]+|分半|个半)?"
_HALF = re.compile(r"\s+and\s+a\s+half$")
_ENGLISH = re.compile(ENGLISH, re.IGNORECASE)


def english_value(text: str) -> float | None:
    """The value of English number words; None if they are none."""
    words = text.lower().strip()
    if not _ENGLISH.fullmatch(words):
        return None
    if words.split() == ["one", "hundred"]:
        return 100.0
    words, halves = _HALF.subn("", words)
    whole, _, decimal = words.partition(" point ")
    number = float(sum(_VALUES[part] for part in whole.strip().split("-")))
    if decimal:
        digit = _VALUES[decimal.strip()]
        return number + digit / 10 if digit < 10 else None
    return number + 0.5 * halves


def chinese_value(text: str) -> float | None:
    """The value of Chinese numerals from 0 to 199, such as 八, 十二, 八十五, 一百 or 八点五; None for anything else."""
    whole, _, decimal = text.partition("点")
    number = _below_200(whole)
    if number is None or any(char not in _HANZI for char in decimal):
        return None
    return float(f"{number}.{''.join(str(_HANZI[char]) for char in decimal)}") if decimal else float(number)


def _below_200(text: str) -> int | None:
    found = re.fullmatch(
        r"(?P<hundred>一?百)?零?(?P<ten>[一二三四五六七八九]?十)?(?P<one>[零〇一二两三四五六七八九])?", text
    )
    if found is None or not text:
        return None
    tens = 0
    if found["ten"]:
        tens = 10 * _HANZI.get(found["ten"][0], 1)
    return (100 if found["hundred"] else 0) + tens + _HANZI.get(found["one"] or "零", 0)
