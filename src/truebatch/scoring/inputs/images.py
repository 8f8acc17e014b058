"""Images of samples: sizes from headers for planning, pixels when they are needed, and a kind for all that can be wrong."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.io.images import rgb_image, upright_size
from truebatch.planning.lengths.image_size import MAX_PIXELS, header_size, opened_image
from truebatch.scoring.backends.interface import SampleError


def image_sizes(images: Sequence[Any]) -> list[tuple[int, int]]:
    """(height, width) of every image from its header, as the pixels will be after EXIF rotation."""
    return [_size(image) for image in images]


def open_image(image: Any) -> Any:
    """The image as RGB pixels, upright; what is wrong with it raises `SampleError` of the stage `decode`."""
    if hasattr(image, "tobytes") and hasattr(image, "mode"):
        with _named(image):
            return rgb_image(image)
    with _named(image), _opened(image) as opened:
        opened.load()
        return rgb_image(opened)


def _size(image: Any) -> tuple[int, int]:
    if hasattr(image, "tobytes") and hasattr(image, "mode"):
        return upright_size(image)
    with _named(image), _opened(image) as opened:
        return header_size(opened)


@contextmanager
def _opened(image: Any) -> Iterator[Any]:
    source = io.BytesIO(image) if isinstance(image, bytes | bytearray | memoryview) else Path(image)
    with opened_image(source, max_pixels=2**62) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise SampleError("decode", "too_many_pixels", f"{_name(image)}: {opened.width} x {opened.height} pixels")
        yield opened


@contextmanager
def _named(image: Any) -> Iterator[None]:
    """Errors of Pillow as records."""
    try:
        yield
    except SampleError:
        raise
    except _pillow().DecompressionBombError as error:
        raise SampleError("decode", "too_many_pixels", f"{_name(image)}: {str(error)[:200]}") from error
    except FileNotFoundError as error:
        raise SampleError("decode", "unreadable_image", f"there is no image {_name(image)}") from error
    except (OSError, SyntaxError, ValueError, ArithmeticError, IndexError, TypeError) as error:
        kind = "truncated_image" if "truncated" in str(error) else "unreadable_image"
        raise SampleError("decode", kind, f"{_name(image)}: {str(error)[:200]}") from error


def _name(image: Any) -> str:
    if hasattr(image, "mode"):
        return f"an image of mode {image.mode}"
    return str(image) if isinstance(image, str | Path) else f"an image of {len(image):,} bytes"


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "images need the package pillow", seen=str(error), do="pip install 'truebatch[vision]'"
        ) from error
    return Image
