"""Whatever is wrong with an image is a record of its sample, with a kind, before a model sees it."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image, ImageFile

from truebatch.scoring.backends.interface import SampleError
from truebatch.scoring.inputs.images import image_sizes, open_image


def data(kind="PNG", size=(40, 30), **more):
    file = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(file, kind, **more)
    return file.getvalue()


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width, height):
    """A file that claims this size and holds nothing."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


POISON = {
    "no bytes": (b"", "unreadable_image"),
    "a text": (b"this is no image at all", "unreadable_image"),
    "a page": (b"<html><body>404 not found</body></html>", "unreadable_image"),
    "a cut JPEG": (data("JPEG")[:-200], "truncated_image"),
    "a cut PNG": (data()[: len(data()) // 2], "truncated_image"),
    "a cut header": (data("JPEG")[:12], "unreadable_image"),
    "a cut GIF": (data("GIF")[:60], None),
    "a WEBP header": (data("WEBP")[:20], "unreadable_image"),
    "a bomb": (png(60_000, 60_000), "too_many_pixels"),
    "a large claim": (png(16_000, 16_000), "too_many_pixels"),
    "no pixels": (png(0, 0), None),
    "no data": (png(50, 50), None),
    "a PDF": (b"%PDF-1.4 ...", "unreadable_image"),
    "zeros": (bytes(1000), "unreadable_image"),
    "an archive": (b"PK\x03\x04" + bytes(100), "unreadable_image"),
    "missing": ("no/such/file.png", "unreadable_image"),
    "a folder": (".", "unreadable_image"),
}
"""Name -> what is given, and its kind; None: any kind of the stage `decode`."""


@pytest.mark.parametrize("name", POISON)
def test_every_broken_image_is_a_record_of_the_stage_decode(name):
    given, kind = POISON[name]
    with pytest.raises(SampleError) as told:
        open_image(given)
    assert told.value.stage == "decode"
    assert kind is None or told.value.kind == kind
    assert str(told.value)


@pytest.mark.parametrize(
    "name", ["no bytes", "a text", "a cut header", "a bomb", "a large claim", "missing", "a folder"]
)
def test_what_the_header_shows_is_found_without_decoding(name):
    with pytest.raises(SampleError):
        image_sizes([POISON[name][0]])


@pytest.mark.parametrize("turn", range(1, 9))
def test_sizes_from_headers_are_those_of_the_upright_pixels(tmp_path, turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    file = tmp_path / "a.jpg"
    file.write_bytes(data("JPEG", exif=exif))
    for given in (str(file), file.read_bytes()):
        ((height, width),) = image_sizes([given])
        assert open_image(given).size == (width, height)
    assert (width, height) == ((40, 30) if turn < 5 else (30, 40))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I"])
def test_images_of_every_mode_become_rgb(mode):
    image = Image.effect_noise((6, 5), 60).convert(mode)
    assert open_image(image).mode == "RGB"
    assert image_sizes([image]) == [(5, 6)]


def test_the_size_of_a_png_is_told_without_its_pixels(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", _never)
    assert image_sizes([data(size=(40, 30))]) == [(30, 40)]


def _never(self):
    raise AssertionError("pixels were decoded")


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_turned_image_has_the_size_its_pixels_will_have(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    given = data(kind, size=(40, 30), exif=exif)
    opened = open_image(given)
    assert image_sizes([given]) == [(opened.height, opened.width)]


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_turned_png_has_the_size_its_pixels_will_have(orientation, at_end):
    exif = Image.Exif()
    exif[0x0112] = orientation
    given = data(size=(40, 30), exif=exif)
    if at_end:  # behind the pixels, where the format allows it too
        first = given.index(b"eXIf") - 4
        length = int.from_bytes(given[first : first + 4], "big") + 12
        end = given.index(b"IEND") - 4
        given = given[:first] + given[first + length : end] + given[first : first + length] + given[end:]
    opened = open_image(given)
    assert image_sizes([given]) == [(opened.height, opened.width)]
