"""Read users' text files in the encodings they really come in; errors name the file and line.

bytes -> (.gz or .zst?) -> (byte order mark?) -> UTF-8 text, whole or line by line
"""

from __future__ import annotations

import codecs
import difflib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from truebatch.errors import DataError
from truebatch.io.compressed_files import COMPRESSED, open_unpacked

MAX_LINE_BYTES = 64 * 2**20
_UTF16_MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16", codecs.BOM_UTF32_BE: "UTF-32"}


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading bytes; a path that is not a readable file gets a three-part error."""
    if not path.exists():
        _refuse_missing(path)
    if path.is_dir():
        raise DataError(
            f"{path} is a folder, but a file is needed",
            seen=f"it holds {_names(path)}",
            do="give the path of one file in it",
        )
    if not path.is_file():  # Reading a pipe or a device might never end.
        raise DataError(
            f"{path} is not a regular file",
            seen="a pipe, a device or a socket",
            do="write its content to a file first, and give the path of that file",
        )
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be opened", seen=str(error), do="check its permissions") from error


@contextmanager
def open_content(path: Path) -> Iterator[BufferedReader]:
    """The bytes of a file; a compressed one is opened as what it holds."""
    with open_file(path) as file:
        if path.suffix.lower() not in COMPRESSED:
            yield file
            return
        with open_unpacked(path, file) as content:
            yield content


def unpacked_suffix(path: Path) -> str:
    """The ending that says what a file holds: .jsonl of texts.jsonl.gz."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def read_text(path: Path, *, max_bytes: int) -> str:
    """Read a whole UTF-8 file of at most `max_bytes` bytes, without its byte order mark."""
    if path.suffix.lower() in COMPRESSED:
        return _read_unpacked(path, max_bytes)
    with open_file(path) as file:
        size = path.stat().st_size
        is_larger = size > max_bytes
        data = b"" if is_larger else file.read(size + 1)  # read() allocates the requested size up front
        if len(data) > size:  # it is growing, or its size is not known
            data += file.read(max_bytes + 1 - len(data))
    if is_larger or len(data) > max_bytes:
        _refuse_large(path, path.stat().st_size, max_bytes)
    return _whole_text(path, data)


def _read_unpacked(path: Path, max_bytes: int) -> str:
    with open_content(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        _refuse_large(path, len(data), max_bytes)
    return _whole_text(path, data)


def _whole_text(path: Path, data: bytes) -> str:
    _refuse_utf16(path, data)
    return _decode(path, data.removeprefix(codecs.BOM_UTF8), first_line=1)


def _refuse_large(path: Path, size: int, most: int) -> NoReturn:
    raise DataError(
        f"{path} is too large for this kind of file",
        seen=f"{size:,} bytes, at most {most:,} are read",
        do="check that this is the file you meant",
    )


def read_start(path: Path, *, max_bytes: int) -> str:
    """The text at the beginning of a file; bytes that are not UTF-8 are replaced."""
    with open_file(path) as file:
        return file.read(max_bytes).decode("utf-8", errors="replace")


def bounded_lines(file: BufferedReader, *, most: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """Every line of an open file; None for a line longer than `most` bytes.

    Pieces of such a line would each look like a line.
    """
    while line := file.readline(most + 1):
        is_longer = len(line) > most
        rest = line
        while is_longer and rest and not rest.endswith(b"\n"):
            rest = file.readline(most)
        yield None if is_longer else line


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line of a UTF-8 file with its number from 1; one line is in memory at a time."""
    with open_content(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                _refuse_utf16(path, line)
                line = line.removeprefix(codecs.BOM_UTF8)
            if len(line) > MAX_LINE_BYTES:
                _refuse_long_line(path, number)
            yield number, _decode(path, line, first_line=number)


def _decode(path: Path, data: bytes, *, first_line: int) -> str:
    zero = data.find(0)
    if zero >= 0:
        line, column = first_line + data.count(b"\n", 0, zero), zero - data.rfind(b"\n", 0, zero)
        raise DataError(
            f"{path}:{line} holds a NUL byte: it is not text, or was only partly written",
            seen=f"byte 0x00 at byte {column} of the line",
            do="write the file again, as UTF-8 text",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse_encoding(path, data, error, first_line)


def _refuse_encoding(path: Path, data: bytes, error: UnicodeDecodeError, first_line: int) -> NoReturn:
    line = first_line + data.count(b"\n", 0, error.start)
    start = data.rfind(b"\n", 0, error.start) + 1
    excerpt = data[start : start + 40].split(b"\n")[0]
    try:
        guess, shown = "GBK", excerpt.decode("gb18030", errors="ignore")
        data.decode("gb18030")
    except UnicodeDecodeError:
        guess, shown = None, repr(excerpt)
    raise DataError(
        f"{path}:{line} is not UTF-8" + (f"; it reads as {guess}" if guess else ""),
        seen=f"byte 0x{data[error.start]:02x}; the line begins {shown!r}",
        do=_convert(path, "GB18030") if guess else "find out its encoding and convert it to UTF-8",
    ) from error


def _refuse_utf16(path: Path, data: bytes) -> None:
    for mark, name in _UTF16_MARKS.items():
        if data.startswith(mark):
            name = "UTF-32" if data.startswith(codecs.BOM_UTF32_LE) else name
            raise DataError(
                f"{path} is {name}, but UTF-8 is needed",
                seen=f"it begins with the byte order mark {mark.hex(' ')}",
                do=_convert(path, name),
            )


def _convert(path: Path, encoding: str) -> str:
    target = path.with_name(f"utf8-{path.name}")
    return f"convert it: iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(target))}"


def _refuse_long_line(path: Path, number: int) -> NoReturn:
    raise DataError(
        f"{path}:{number} is too long to be one sample",
        seen=f"more than {MAX_LINE_BYTES:,} bytes without a line end",
        do="write one JSON object per line; a JSON array belongs in a .json file",
    )


def _refuse_missing(path: Path) -> NoReturn:
    folder = path.parent
    hint = nearest(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else ""
    where = f"{folder} holds {_names(folder)}" if folder.is_dir() else f"there is no folder {folder} either"
    raise DataError(f"there is no file {path}{hint}", seen=where, do="check the path")


def _names(folder: Path, most: int = 5) -> str:
    names = sorted(p.name for p in folder.iterdir())
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "nothing"
