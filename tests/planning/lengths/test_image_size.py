"""Image sizes come from headers alone; what is no image is named."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from truebatch.errors import ConfigError, DataError
from truebatch.planning.lengths.image_size import measure_images

image = pytest.importorskip("PIL.Image")


def write(path: Path, size: tuple[int, int]) -> Path:
    image.new("RGB", size, (9, 9, 9)).save(path)
    return path


def test_sizes_are_width_and_height_of_every_image_in_order(tmp_path):
    files = [
        write(tmp_path / f"{i}{kind}", (10 + i, 20)) for i, kind in enumerate((".png", ".jpg", ".webp", ".gif", ".bmp"))
    ]
    assert measure_images(files).tolist() == [[10 + i, 20] for i in range(5)]
    assert measure_images([]).shape == (0, 2)


def test_no_pixel_is_decoded(tmp_path):
    file = write(tmp_path / "a.png", (300, 200))
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.index(b"IDAT") + 4])
    assert measure_images([file]).tolist() == [[300, 200]]


def png_that_claims(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\0IDAT"
    )


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("bomb.png", png_that_claims(100_000, 100_000), "more pixels than allowed"),
        ("large.png", png_that_claims(12_000, 12_000), "more pixels than allowed"),
        ("text.png", b"hello", "not a readable image"),
        ("empty.png", b"", "not a readable image"),
        ("short.png", png_that_claims(9, 9)[:20], "not a readable image"),
        ("script.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable image"),
    ],
)
def test_what_is_no_usable_image_is_refused_by_name(tmp_path, name, data, expected):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=expected) as caught:
        measure_images([tmp_path / name])
    assert name in str(caught.value)


def test_a_missing_image_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"no image .*nowhere\.png"):
        measure_images([tmp_path / "nowhere.png"])
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install 'truebatch\[vision\]'"):
        measure_images([])
