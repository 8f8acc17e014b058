"""Sample galleries: small pictures with captions, as many as fit a page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truebatch.io.images import rgb_image
from truebatch.planning.lengths.image_size import FORMATS
from truebatch.reports.page import Card, Image

SIDE = 200
"""Thumbnail size in pixels (longer side)."""
LONGEST = 400
"""Characters per caption line."""
MOST_IMAGES = 4
_MOST_PIXELS = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class Exhibit:
    """One stored gallery sample: its pictures and captions."""

    title: str
    words: Sequence[str] = ()
    images: Sequence[tuple[Any, str]] = field(default=())
    """A path, bytes or a picture, and its caption."""


def make_card(exhibit: Exhibit) -> Card:
    """The sample with thumbnails; text explains any picture that cannot be shown."""
    images: list[Image] = []
    lost = []
    for source, caption in exhibit.images[:MOST_IMAGES]:
        found = small_picture(source)
        if isinstance(found, str):
            lost.append(f"{caption or 'picture'}: {found}")
        else:
            images.append(("image/jpeg", found, caption))
    more = len(exhibit.images) - MOST_IMAGES
    lost += [f"{more} more pictures"] if more > 0 else []
    return Card(title=exhibit.title, words=[*(shorten(line) for line in exhibit.words), *lost], images=images)


def small_picture(source: Any) -> bytes | str:
    """A picture as a small JPEG, or why there is none."""
    from PIL import Image as Pillow

    try:
        opened = source if hasattr(source, "tobytes") and hasattr(source, "mode") else _opened(source)
        if opened.width * opened.height > _MOST_PIXELS:
            return f"not shown, {opened.width} x {opened.height} pixels"
        small = rgb_image(opened)
        small.thumbnail((SIDE, SIDE))
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        return f"cannot be read ({type(error).__name__})"
    held = io.BytesIO()
    small.save(held, "JPEG", quality=82)
    return held.getvalue()


def _opened(source: Any) -> Any:
    from PIL import Image as Pillow

    if isinstance(source, bytes | bytearray | memoryview):
        return Pillow.open(io.BytesIO(source), formats=FORMATS)
    if Path(source).exists() and not Path(source).is_file():
        raise OSError("a folder, a pipe or a device")
    return Pillow.open(Path(source), formats=FORMATS)


def shorten(line: str) -> str:
    """Shorten text to one line of a gallery card."""
    text = " ".join(str(line).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."


def plain_exhibit(exhibit: Exhibit) -> dict[str, Any]:
    """For JSON: pictures by their path."""
    images = [{"file": str(source), "caption": caption} for source, caption in exhibit.images]
    return {"title": exhibit.title, "words": list(exhibit.words), "images": images}


def read_exhibit(values: Mapping[str, Any], folder: Path) -> Exhibit:
    """Load a stored sample; a picture outside the folder is not opened."""
    inside = folder.resolve()
    images = []
    for one in values["images"]:
        path = (inside / str(one["file"])).resolve()
        if path.is_relative_to(inside):
            images.append((path, str(one["caption"])))
    return Exhibit(title=str(values["title"]), words=[str(line) for line in values["words"]], images=images)
