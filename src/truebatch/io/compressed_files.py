"""What is in a compressed file, read piece by piece and with an end: a few bytes can unpack to any number of them."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truebatch.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

COMPRESSED = (".gz", ".zst")
"""Endings of names of compressed files; the ending before says what is in them."""
MOST_RATIO = 100
"""A file may unpack to so many times its own size. Tables and texts come to 5 to 30 times."""
FREE_BYTES = 16 * 2**20
"""So much is read of every file, whatever its ratio."""
_PIECE = 1 << 17


@contextmanager
def open_unpacked(path: Path, file: io.BufferedReader) -> Iterator[io.BufferedReader]:
    """The content of an open compressed file; damage, and a ratio that no text has, raise `DataError`."""
    try:
        with _stream(path, file) as stream:
            yield io.BufferedReader(_Measured(path, file, stream), buffer_size=_PIECE)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be unpacked; it is damaged, or no {path.suffix.lower()} file",
            seen=str(error)[:200],
            do="copy or pack the file again",
        ) from error


class _Measured(io.RawIOBase):
    """A stream of unpacked bytes that compares what it gave with what was read of the file."""

    def __init__(self, path: Path, file: io.BufferedReader, stream: Any) -> None:
        self.path, self.file, self.stream = path, file, stream
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """The next bytes, at most as many as fit."""
        data = self.stream.read(min(memoryview(buffer).nbytes, _PIECE))
        memoryview(buffer)[: len(data)] = data
        self.given += len(data)
        read = self.file.tell()
        if self.given > max(FREE_BYTES, MOST_RATIO * read):
            raise DataError(
                f"{self.path} unpacks to far more than texts and tables do",
                seen=f"{self.given:,} bytes out of {read:,}, and more to come; at most {MOST_RATIO} times as many are read",
                do="if it should, unpack it and give the unpacked file",
            )
        return len(data)


def _stream(path: Path, file: io.BufferedReader) -> Any:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=file)
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            "reading .zst files needs the package pyarrow", seen=f"{path}; {error}", do="pip install 'truebatch[data]'"
        ) from error
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
