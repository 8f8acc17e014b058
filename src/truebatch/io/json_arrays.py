"""A JSON array of a compressed file, value by value: neither its text nor its values are ever in memory together."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from truebatch.errors import DataError
from truebatch.io.text_encoding import MAX_LINE_BYTES, open_content

_PIECE = 1 << 16
_SPACE = " \t\r\n"


def stream_array(path: Path) -> Iterator[Any]:
    """The values of the array in a file; nothing of a file without a value."""
    with open_content(path) as file:
        text = _Text(path, file)
        first = text.next_character()
        if not first:
            return
        if first != "[":
            raise DataError(
                f"{path} must hold a JSON array of samples",
                seen=f"it begins {text.held[text.at : text.at + 40]!r}",
                do="write a list [...], or one sample per line as .jsonl",
            )
        text.at += 1
        mark = "," if text.next_character() != "]" else "]"
        while mark != "]":
            yield text.value()
            mark = text.next_character()
            if mark not in ("]", ","):
                text.refuse(
                    f"{text.place} is not preceded by a comma, nor is the array closed",
                    do="mend it there, or write the file again",
                )
            text.at += mark == ","
        text.at += 1
        if text.next_character():
            text.refuse(f"{path} has more text after its array", do="if it holds a value per line, name it .jsonl")


class _Text:
    """The text of a file from where it has been read to."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path, self.file = path, file
        self.decode = codecs.getincrementaldecoder("utf-8-sig")()
        self.held, self.at, self.number = "", 0, 0
        self.is_whole = False

    def next_character(self) -> str:
        """The first character that is no space; nothing at the end."""
        while True:
            while self.at < len(self.held) and self.held[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.held) or self.is_whole:
                return self.held[self.at : self.at + 1]
            self._read_on(_PIECE)

    def value(self) -> Any:
        """The next value; it is parsed anew with twice the text until it is whole."""
        self.next_character()
        while True:
            try:
                found, end = json.JSONDecoder().raw_decode(self.held, self.at)
            except (RecursionError, ValueError) as error:
                if self.is_whole or not isinstance(error, json.JSONDecodeError) or self._has_nul():
                    self.refuse(f"{self.place} is not valid JSON", do="mend it there, or write the file again")
            else:
                if end < len(self.held) or self.is_whole:  # more digits of a number may follow
                    self.at, self.number = end, self.number + 1
                    return found
            if len(self.held) - self.at > MAX_LINE_BYTES:
                self.refuse(f"{self.place} is too long to be one sample", do="write each sample as a value of its own")
            self._read_on(max(_PIECE, len(self.held) - self.at))

    def _has_nul(self) -> bool:
        return self.held.find("\0", self.at) >= 0

    def _read_on(self, size: int) -> None:
        data = self.file.read(size)
        self.is_whole = not data
        try:
            self.held, self.at = self.held[self.at :] + self.decode.decode(data, final=self.is_whole), 0
        except UnicodeDecodeError as error:
            raise DataError(f"{self.place} is not UTF-8", seen=str(error)[:200], do="convert it to UTF-8") from error

    @property
    def place(self) -> str:
        """The value that is being read, for messages."""
        return f"{self.path} [{self.number}]"

    def refuse(self, wrong: str, *, do: str) -> NoReturn:
        """Raise `DataError` with what stands here."""
        raise DataError(
            wrong, seen=repr(self.held[self.at : self.at + 40]) if self.held[self.at :] else "nothing", do=do
        )
