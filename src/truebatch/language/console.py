"""What a person reads goes out here, in their language, and nothing that leaves a command steers the terminal.

A name, an answer or a message out of a file may hold escapes. `shown` writes them as `\\u001b`, which in JSON still means
the same; `filtered` puts it around both streams of a command, for what is written past the functions of this file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, cast

from truebatch.language.locale import language
from truebatch.language.translate import LABELS, in_words

_PERSON, _QUERY_VALUE = re.compile(r"(\w://)\S*@"), re.compile(r"(\w://[^\s?]*\?)(\S+)")
_FURTHER = " " * 8
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters but line ends and tabs; line ends of other kinds; what turns the direction of writing; halves of
characters; tags."""
_BREAKS = re.compile("\r\n|[\n\t]")
before_output: list[Callable[[str], None]] = []
"""Called with what a command is about to write to its streams: a line that stands there only for now is taken away."""


def shown(text: str) -> str:
    """The text with every character that a terminal obeys as an escape that is read, not carried out."""
    return _OBEYED.sub(_escaped, text)


def one_line(text: str) -> str:
    """The same on one line: a value from a file cannot pose as a line of its own."""
    return shown(_BREAKS.sub(" ", text))


def say(text: str = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Write a text for a person to a stream (default standard output), line by line in their language."""
    out = file or sys.stdout
    out.write(shown(in_words(text)) + end)
    out.flush()


def say_error(wrong: str, seen: str, do: str, *, file: TextIO | None = None) -> None:
    """Write the three parts of an error to a stream (default standard error)."""
    (file or sys.stderr).write(error_text(wrong, seen, do))


def error_text(wrong: str, seen: str, do: str) -> str:
    """An error in the language of the person; further lines of a part are indented, none poses as another part."""
    label, *labels = LABELS.values() if language() == "zh" else LABELS
    parts = [in_words(part.replace("\n", f"\n{_FURTHER}")) for part in (wrong, seen, do)]
    return shown(f"{label}{_joined(*parts, labels=labels)}\n")


def three_parts(wrong: str, seen: str, do: str) -> str:
    """What is wrong, what was seen and what to do as one English text: for exceptions, logs and files."""
    return _joined(wrong, seen, do, labels=[*LABELS][1:])


def _joined(wrong: str, seen: str, do: str, *, labels: Sequence[str]) -> str:
    return mask_secrets(f"{wrong}\n  {labels[0]}{seen}\n  {labels[1]}{do}")


def mask_secrets(text: str) -> str:
    """A text whose addresses show no name, no password and no value behind a question mark: any may be a key."""
    text = _PERSON.sub(r"\1***@", text)
    return _QUERY_VALUE.sub(lambda found: found[1] + re.sub(r"(^|&)([^=&]*=)?[^&]*", r"\1\2***", found[2]), text)


class Filtered:
    """A stream whose texts are written as they are `shown`; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text; a carriage return stays, bars of other libraries begin their line anew with it."""
        for call in before_output:
            call(text)
        self.stream.write("\r".join(map(shown, text.split("\r"))))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def filtered() -> Iterator[None]:
    """Both streams of this process write what is shown, until the end of the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", Filtered(unfiltered(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unfiltered(stream: TextIO) -> TextIO:
    """The stream itself, for our own bars and lines that replace one another; texts in them are `shown` before."""
    return stream.stream if isinstance(stream, Filtered) else stream


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"\\u{unit:04x}" for unit in _units(ord(found[0])))


def _units(point: int) -> tuple[int, ...]:
    """As JSON writes a character: in one unit of 16 bits, or in two."""
    return (point,) if point < 0x10000 else (0xD7C0 + (point >> 10), 0xDC00 + (point & 0x3FF))
