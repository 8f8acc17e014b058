"""The images a record names: files beside the data, or bytes inside it. Sizes come from headers, pixels when needed."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.images import rgb_image
from truebatch.planning.lengths.image_size import FORMATS, MAX_PIXELS, header_size, opened_image

ImageSource = Path | bytes
_DATA = "data:"


def read_source(value: Any, folder: Path, place: str) -> ImageSource:
    """A path (relative to `folder`), a data: URI, or the bytes that Parquet keeps; anything else raises `DataError`."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{place} names no image", seen=f"{value!r:.80}", do="give the path of a file, or a data: URI with base64"
        )
    if value.startswith(_DATA):
        return _of_uri(value, place)
    if value.startswith(("http://", "https://")):
        raise DataError(
            f"{place}: images are not downloaded while training",
            seen=value[:120],
            do="download them first and write their paths, or put them in as data: URIs",
        )
    path = Path(value.removeprefix("file://"))
    return path if path.is_absolute() else folder / path


def _of_uri(value: str, place: str) -> bytes:
    kind, comma, content = value.partition(",")
    try:
        if not comma or not kind.endswith(";base64"):
            raise ValueError("no base64 in it")
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(
            f"{place} has a data: URI that cannot be read",
            seen=f"{value[:40]!r}...: {error}",
            do="write it as data:image/png;base64, followed by the encoded file",
        ) from error


def source_size(source: ImageSource, place: str) -> tuple[int, int]:
    """(height, width) from the header, as the pixels will be."""
    with _opened(source, place) as opened:
        height, width = header_size(opened)
    if height < 1 or width < 1:
        raise DataError(f"{place}: {_name(source)} has no pixels", seen=f"{width} x {height} pixels", do="remove it")
    return height, width


def source_pixels(source: ImageSource, place: str) -> Any:
    """The image in RGB, upright."""
    with _opened(source, place) as opened:
        opened.load()
        return rgb_image(opened)


@contextmanager
def _opened(source: ImageSource, place: str) -> Iterator[Any]:
    from PIL.Image import DecompressionBombError

    try:
        with opened_image(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            yield opened
    except FileNotFoundError as error:
        raise DataError(
            f"{place}: there is no image {_name(source)}",
            seen=str(error),
            do="check the path; --set image_folder=FOLDER says where relative paths begin (else: beside the data)",
        ) from error
    except (OSError, SyntaxError, ValueError, ArithmeticError, IndexError, TypeError, DecompressionBombError) as error:
        raise DataError(
            f"{place}: {_name(source)} is not a readable image",
            seen=f"{str(error)[:160]}; formats: {', '.join(FORMATS)}, at most {MAX_PIXELS:,} pixels",
            do="convert it to PNG or JPEG, or remove the record",
        ) from error


def _name(source: ImageSource) -> str:
    return str(source) if isinstance(source, Path) else f"an image of {len(source):,} bytes"
