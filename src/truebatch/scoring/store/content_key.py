"""A key for the content of a sample: its words, its options and the bytes of its images, not its place or its name.

Reordered or appended data keeps all work; samples of equal content are scored once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.images import ORIENTATION

_CHUNK = 1 << 20
_NUM_BYTES = 16
_TEXTS = {str}
quoted = json.encoder.encode_basestring
"""A text as JSON, in Unicode."""
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
"""Made once: making it takes longer than most samples."""


def sample_key(content: Mapping[str, Any], images: Sequence[Any] = ()) -> str:
    """The key of a sample: a hash of its JSON content and of every image (a path, bytes, or pixels in memory)."""
    digest = hashlib.blake2b(digest_size=_NUM_BYTES)
    digest.update(canonical(content).encode("utf-8", "surrogatepass"))
    for image in images:
        digest.update(b"\x00image\x00" + image_hash(image))
    return digest.hexdigest()


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values, whatever the order of their names."""
    if type(value) is dict and _TEXTS.issuperset(map(type, value.values())) and _TEXTS.issuperset(map(type, value)):
        return flat_json(value)
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            "a sample's content must be plain data", seen=f"{type(error).__name__}: {error}", do="use texts and numbers"
        ) from error


def flat_json(value: Mapping[str, str]) -> str:
    """The same for names and texts only, as most samples are: an encoder is not made for each."""
    return "{" + ",".join([f"{quoted(name)}:{quoted(value[name])}" for name in sorted(value)]) + "}"


def image_hash(image: Any) -> bytes:
    """A hash of an image: of the file's bytes, of the bytes given, or of mode, size and pixels of one in memory."""
    digest = hashlib.blake2b(digest_size=_NUM_BYTES)
    if isinstance(image, bytes | bytearray | memoryview):
        digest.update(image)
    elif isinstance(image, str | Path):
        _add_file(digest, Path(image))
    elif hasattr(image, "tobytes") and hasattr(image, "mode"):  # a PIL image
        digest.update(f"{image.mode} {image.size}".encode())
        digest.update(image.tobytes())
        digest.update(_look(image))
    else:
        raise DataError(
            "an image is a path, bytes, or a PIL image", seen=f"a {type(image).__name__}", do="give one of the three"
        )
    return digest.digest()


def _look(image: Any) -> bytes:
    """What else decides how an image in memory looks: its palette, its transparent colour, how it is turned."""
    turn, clear = image.getexif().get(ORIENTATION, 1), image.info.get("transparency")
    palette = image.getpalette("RGBA") if image.mode in ("P", "PA") else None
    return b"" if turn == 1 and clear is None and palette is None else f"{turn} {clear!r} {palette}".encode()


def _add_file(digest: Any, path: Path) -> None:
    if path.exists() and not path.is_file():
        raise DataError(
            f"the image {path} cannot be read", seen="a folder, a pipe or a device", do="name a file with a picture"
        )
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DataError(
            f"the image {path} cannot be read", seen=error.strerror or str(error), do="check the path"
        ) from error
