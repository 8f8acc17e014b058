"""Image width and height from file headers, without decoding pixels."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import IO, Any, NoReturn

import numpy as np

from truebatch.errors import ConfigError, DataError
from truebatch.io.images import ORIENTATION, QUARTER_TURNS
from truebatch.planning.rows import Ints

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 2**27
PNG_BEGINNING = b"\x89PNG\r\n\x1a\n"
PNG_WORDS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
"""Pieces of a PNG file that may say how it is turned."""
PNG_PIECES = 100_000
"""A file with more is asked in Pillow's own way."""
_FILTERS = Lock()


def measure_images(
    paths: Iterable[str | Path], *, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = FORMATS
) -> Ints:
    """[N, 2] width and height of every image file, as stored (before any EXIF rotation).

    A file that is missing, is not one of `formats`, is damaged in its header, or claims more than `max_pixels`
    raises `DataError` with its name. A file truncated after its header is not detected here.
    """
    image = _pillow()
    sizes = [_size(image, Path(path), max_pixels, formats) for path in paths]
    return np.array(sizes, dtype=np.int64).reshape(len(sizes), 2)


@contextmanager
def opened_image(
    source: Path | IO[bytes], *, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = FORMATS
) -> Iterator[Any]:
    """Open an image with only its header read; decode the pixels inside the block.

    Only `formats` are tried: some others that Pillow knows start programs. Anything else, an image that claims more
    than `max_pixels`, or a pipe raises an error of Pillow, `OSError` or `ValueError`.
    """
    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise OSError("a folder, a pipe or a device")
    library = _pillow()
    # Pillow warns about (or rejects) large images at its own limit; ours is checked here instead. Warning filters
    # are per process: two threads changing them at once would leave one of the changes behind.
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore", library.DecompressionBombWarning)
        found = library.open(source, formats=formats)
    with found as opened:
        if opened.width * opened.height > max_pixels:
            raise ValueError(f"{opened.width:,} x {opened.height:,} pixels; at most {max_pixels:,}")
        yield opened


def header_size(opened: Any) -> tuple[int, int]:
    """(height, width) of an image opened by `opened_image`, as its pixels will be after EXIF rotation; nothing is decoded."""
    width, height = opened.size
    is_turned = _says_more(opened) and opened.getexif().get(ORIENTATION, 1) in QUARTER_TURNS
    return (width, height) if is_turned else (height, width)


def _says_more(opened: Any) -> bool:
    """Whether an image may say how it is turned. To ask a PNG, Pillow decodes all of it, as that may stand at its end."""
    if opened.format == "TIFF":  # Pillow gives its size as it will be
        return False
    if opened.format != "PNG":
        return True
    file = opened.fp
    before, at = file.tell(), len(PNG_BEGINNING)
    try:
        for _ in range(PNG_PIECES):
            file.seek(at)
            head = file.read(8)
            if len(head) < 8:
                return False
            if head[4:] in PNG_WORDS:
                return True
            at += int.from_bytes(head[:4], "big") + 12  # length, kind and checksum
        return True
    finally:
        file.seek(before)


def _size(image: Any, path: Path, max_pixels: int, formats: tuple[str, ...]) -> tuple[int, int]:
    try:
        with opened_image(path, max_pixels=2**62, formats=formats) as opened:
            width, height = opened.size
    except image.DecompressionBombError as error:
        _refuse_pixels(path, str(error), max_pixels)
    except FileNotFoundError as error:
        raise DataError(f"there is no image {path}", seen=str(error), do="check the path") from error
    except (OSError, SyntaxError, ValueError, ArithmeticError, IndexError, TypeError) as error:
        raise DataError(
            f"{path} is not a readable image",
            seen=f"{str(error)[:120]}; formats tried: {', '.join(formats)}",
            do="remove it, or convert it to PNG or JPEG",
        ) from error
    if width * height > max_pixels:
        _refuse_pixels(path, f"{width:,} x {height:,} pixels", max_pixels)
    if width < 1 or height < 1:
        raise DataError(f"{path} is an empty image", seen=f"{width} x {height} pixels", do="remove it")
    return width, height


def _refuse_pixels(path: Path, seen: str, max_pixels: int) -> NoReturn:
    raise DataError(
        f"{path} claims more pixels than allowed",
        seen=f"{seen}; at most {max_pixels:,}",
        do="make it smaller, or raise max_pixels if you trust the file",
    )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "reading image sizes needs the package pillow", seen=str(error), do="pip install 'truebatch[vision]'"
        ) from error
    return Image
