"""How hostile files are made: a name, what is written, the command or reader it goes to, and what must be said of it."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CANARY = "CODE_WAS_RUN"
"""The folder that code of a hostile file would make, in the current folder."""


@dataclass(frozen=True)
class Hostile:
    """One file or folder that means harm, or is badly broken."""

    name: str
    make: Callable[[Path], Sequence[str] | Callable[[], object]]
    """(an empty folder) -> the command line that meets what was written there, or the reader as a function."""
    says: str
    """Words of the message: the place or the kind of fault."""
    code: int = 2


class Payload:
    """A pickle of this makes the canary when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (CANARY,)


def pickled() -> bytes:
    """Bytes that run code when they are unpickled."""
    return pickle.dumps(Payload())


def torch_zip() -> bytes:
    """The layout of torch.save: a zip whose data.pkl runs code."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("archive/data.pkl", pickled())
        zipped.writestr("archive/version", "3\n")
    return file.getvalue()


def safetensors(header: Any, data: bytes = b"", *, num: int | None = None) -> bytes:
    """A safetensors file with any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if num is None else num) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """What a safetensors header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def png(width: int, height: int, *, rows: int | None = None, color: int = 2) -> bytes:
    """A PNG that claims a size, with as many rows of zeros as asked for (all of them by default)."""
    raw = (b"\0" + b"\0" * (width * 3)) * (height if rows is None else rows)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)), (b"IDAT", zlib.compress(raw, 9))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, [*parts, (b"IEND", b"")]))


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    kind, data = part
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def put(folder: Path, name: str, content: bytes | str | Any) -> Path:
    """Write bytes, text or JSON into a folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes | str):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path
