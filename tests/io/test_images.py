"""One opener: every kind of image gives the same pixels in every part of the package."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from truebatch.io.images import ORIENTATION, rgb_image, upright_size
from truebatch.reports.gallery import small_picture
from truebatch.scoring.inputs.images import image_sizes, open_image
from truebatch.scoring.store.content_key import image_hash
from truebatch_systems.vl_reward.data.dataset import EditPair, decode_image
from truebatch_systems.vlm_pruning.data.image_io import open_images

RAMP = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
COLOURS = np.stack([RAMP, RAMP.T, 255 - RAMP], axis=-1)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def grey16() -> Image.Image:
    return Image.fromarray(RAMP.astype(np.uint16) * 257)


def turned() -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return saved(Image.fromarray(COLOURS[:4]), exif=exif)


def animated() -> bytes:
    frames = [Image.fromarray(RAMP), Image.fromarray(255 - RAMP)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


def clear() -> Image.Image:
    return Image.fromarray(np.dstack([COLOURS, np.where(RAMP < 128, 0, 255).astype(np.uint8)]))


GREY = np.repeat(RAMP[..., None], 3, axis=-1)
ON_WHITE = np.where(RAMP[..., None] < 128, 255, COLOURS).astype(np.uint8)
KINDS = {
    "8-bit colour": (saved(Image.fromarray(COLOURS)), COLOURS),
    "8-bit grey": (saved(Image.fromarray(RAMP)), GREY),
    "16-bit grey PNG": (saved(grey16()), GREY),
    "16-bit grey TIFF": (saved(grey16(), "TIFF"), GREY),
    "black and white": (saved(Image.fromarray(RAMP > 99)), np.where(GREY > 99, 255, 0)),
    "a palette": (saved(Image.fromarray(RAMP).convert("P")), GREY),
    "transparency": (saved(clear()), ON_WHITE),
    "a transparent palette": (
        saved(Image.fromarray(RAMP).convert("P"), transparency=4),
        np.where(GREY == 4, 255, GREY),
    ),
    "a transparent grey": (saved(grey16(), transparency=4 * 257), np.where(GREY == 4, 255, GREY)),
    "turned": (turned(), np.rot90(COLOURS[:4], -1)),
    "animated": (animated(), GREY),
    "CMYK": (saved(Image.fromarray(COLOURS).convert("CMYK"), "TIFF"), COLOURS),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_opened_as_it_looks_and_the_same_everywhere(name, tmp_path):
    data, expected = KINDS[name]
    path = tmp_path / "image"
    path.write_bytes(data)
    with Image.open(path) as loaded:
        found = [open_image(data), open_image(str(path)), open_image(loaded), rgb_image(loaded)]
        found += open_images(str(path), sample="s") + open_images(loaded, sample="s")
        assert image_sizes([data, str(path), loaded]) == [expected.shape[:2]] * 3
        assert upright_size(loaded) == expected.shape[:2]
    found.append(decode_image(EditPair(id="a", category="c", instruction="i", image=str(path), is_path=True)))
    for image in found:
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), expected)
    with Image.open(io.BytesIO(small_picture(data))) as small:
        assert np.abs(np.asarray(small, dtype=int) - expected).mean() < 16  # a JPEG of the same picture


def test_pixels_without_a_scale_are_refused():
    for pixels in (np.ones((2, 2), np.float32), np.full((2, 2), 70_000, np.int32), np.full((2, 2), -1, np.int32)):
        with pytest.raises(ValueError, match="no common scale"):
            rgb_image(Image.fromarray(pixels))


def test_images_that_look_different_have_different_keys():
    """The pixels of a palette image are places in the palette; a turned image has the pixels of one that is not."""
    one = Image.fromarray(RAMP).convert("P")
    other = one.copy()
    other.putpalette(bytes(reversed(one.getpalette())))
    assert one.tobytes() == other.tobytes()
    assert image_hash(one) != image_hash(other)
    with Image.open(io.BytesIO(turned())) as upright:
        plain = Image.fromarray(COLOURS[:4])
        assert upright.tobytes() == plain.tobytes()
        assert image_hash(upright) != image_hash(plain)
