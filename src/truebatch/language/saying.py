"""What a person reads goes out here, in their language. What a program reads is written as it is."""

from __future__ import annotations

import re
import sys
from typing import TextIO

from truebatch.language.choosing import Language, language
from truebatch.language.translating import in_words

LABELS: dict[Language, tuple[str, str, str]] = {
    "en": ("error: ", "seen: ", "do:   "),
    "zh": ("错误：", "看到：", "怎么办："),
}
"""Of the three parts of an error."""
_PERSON, _QUERY_VALUE = re.compile(r"(\w://)\S*@"), re.compile(r"(\w://[^\s?]*\?)(\S+)")
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def say(text: str = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Write a text for a person to a stream (default standard output), line by line in their language."""
    out = file or sys.stdout
    out.write(in_words(text) + end)
    out.flush()


def say_error(wrong: str, seen: str, do: str) -> None:
    """Write the three parts of an error to standard error."""
    sys.stderr.write(error_text(wrong, seen, do))


def error_text(wrong: str, seen: str, do: str) -> str:
    """What is written of an error."""
    return _shown(f"{LABELS[language()][0]}{three_parts(wrong, seen, do)}\n")


def three_parts(wrong: str, seen: str, do: str) -> str:
    """What is wrong, what was seen and what to do, in the language of the person."""
    _, label_seen, label_do = LABELS[language()]
    return mask_secrets(f"{in_words(wrong)}\n  {label_seen}{in_words(seen)}\n  {label_do}{in_words(do)}")


def mask_secrets(text: str) -> str:
    """A text whose addresses show no name, no password and no value behind a question mark: any may be a key."""
    text = _PERSON.sub(r"\1***@", text)
    return _QUERY_VALUE.sub(lambda found: found[1] + re.sub(r"(^|&)([^=&]*=)?[^&]*", r"\1\2***", found[2]), text)


def _shown(text: str) -> str:
    """Text of files and names can hold escapes that a terminal obeys; they are shown, not carried out."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
