"""What a free-form answer says: words made comparable, yes or no, and which of the offered options.

Nothing is guessed: a text that says neither yes nor no, or names no single option, is `None`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_CONTRACTED = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've "
    "he's how'd how'll how's i'd've i'm i've isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't "
    "must've needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll "
    "somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd "
    "there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll "
    "what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't "
    "would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"
)
_RESTORED = {form.replace("'", ""): form for form in _CONTRACTED.split()}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {"none": "0", **{word: str(number) for number, word in enumerate(_NUMBERS)}}
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_LETTERS = "ABCDEFGH"

_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD_NOT_IN_NUMBER = re.compile(r"\.(?!\d)")
_FIRST_SENTENCE = re.compile(r"[^.!?\n]*")
_NO = {"no", "not"}
_ONLY_LETTER = re.compile(r"^\W*([A-Ha-h])\W*$")
_LEADING_LETTER = re.compile(r"^\W*([A-H])\s*[).:,\]]")
_SAID_LETTER = re.compile(
    r"(?i:\b(?:answer|option|choice)\b\s*(?:is|:|=)?\s*)\W*(?:([A-H])\b|([a-h])(?=\W*$|[).:,\]]))"
)
_BRACKETED_LETTER = re.compile(r"[(\[]([A-Ha-h])[)\]]")
_LONE_LETTER = re.compile(r"(?<![\w'])([B-H])(?![\w'])")
_WHOLE_NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w]|\.\d)")


def vqa_words(text: str) -> str:
    """A text as the VQA evaluation compares it: small letters, digits for number words, no articles or punctuation."""
    cleaned = _without_punctuation(" ".join(text.split()))
    words = [_DIGITS.get(word, word) for word in cleaned.lower().split()]
    return " ".join(_RESTORED.get(word, word) for word in words if word not in _ARTICLES)


def _without_punctuation(text: str) -> str:
    """A mark beside a space goes, one between letters becomes a space; a comma or a point inside a number is no space."""
    has_comma = _COMMA_IN_NUMBER.search(text) is not None
    found = text
    for mark in _PUNCTUATION:
        goes = f"{mark} " in text or f" {mark}" in text or has_comma
        found = found.replace(mark, "" if goes else " ")
    return _PERIOD_NOT_IN_NUMBER.sub("", found)


def plain_words(text: str) -> str:
    """Small letters, single spaces, and nothing but words and numbers."""
    return " ".join(re.findall(r"\w+(?:[.,]\d+)*(?:'\w+)?", text.lower()))


def yes_or_no(text: str) -> str | None:
    """`yes` or `no` as the first sentence says it, in whole words; `None` where it says neither."""
    words = plain_words((_FIRST_SENTENCE.match(text.strip()) or [""])[0]).split()
    if words[:1] == ["yes"]:
        return "yes"
    if any(word in _NO or word.endswith("n't") for word in words):
        return "no"
    return "yes" if "yes" in words else None


def chosen_option(text: str, options: Sequence[str], *, is_numbered: bool = False) -> int | None:
    """Which option a text names: by letter (or, numbered from 0, by number), else by the option's own words."""
    number = _by_number(text) if is_numbered else None
    found = number if number is not None else _by_letter(text)
    count = len(options) or len(_LETTERS)
    if found is not None and found < count:
        return found
    return _by_words(text, options)


def _by_number(text: str) -> int | None:
    numbers = {int(one) for one in _WHOLE_NUMBER.findall(text)}
    return numbers.pop() if len(numbers) == 1 else None


def _by_letter(text: str) -> int | None:
    only = _ONLY_LETTER.match(text) or _LEADING_LETTER.match(text)
    if only:
        return _LETTERS.index(only[1].upper())
    for pattern in (_SAID_LETTER, _BRACKETED_LETTER, _LONE_LETTER):
        letters = {"".join(found).upper() for found in pattern.findall(text)}
        if letters:
            return _LETTERS.index(letters.pop()) if len(letters) == 1 else None
    return None


def _by_words(text: str, options: Sequence[str]) -> int | None:
    """The option that a text is, or the only one it holds in whole words; an option inside a longer one does not count."""
    said = plain_words(text)
    words = [plain_words(str(option)) for option in options]
    if said in words and said:
        return words.index(said)
    held = [at for at, one in enumerate(words) if one and f" {one} " in f" {said} "]
    widest = [at for at in held if not any(other != at and f" {words[at]} " in f" {words[other]} " for other in held)]
    return widest[0] if len(widest) == 1 else None


def option_number(answer: Any, options: Sequence[str]) -> int | None:
    """The reference of a sample as an option's number from 0: given as a number, a letter, digits or the words."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer if 0 <= answer < (len(options) or len(_LETTERS)) else None
    text = str(answer).strip()
    words = [plain_words(str(option)) for option in options]
    if len(text) == 1 and text.upper() in _LETTERS:
        return _LETTERS.index(text.upper())
    if plain_words(text) in words:
        return words.index(plain_words(text))
    return int(text) if text.isdigit() else None
