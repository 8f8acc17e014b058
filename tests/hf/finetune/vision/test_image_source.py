"""Images that a record names and that are none: each is named with its place."""

from __future__ import annotations

import os
import struct
import zlib

import pytest

from truebatch.errors import DataError
from truebatch.hf.finetune.vision.image_source import source_pixels, source_size


def bomb():
    """A PNG of 60,000 x 60,000 pixels in a kilobyte."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1_000_000, 9))


@pytest.mark.parametrize("read", [source_size, source_pixels])
def test_what_is_no_image_is_named_with_its_place(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    (tmp_path / "page.png").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    files = [tmp_path / name for name in ("pipe.png", "endless.png", "page.png")]
    for source in (*files, tmp_path, b"", b"<svg/>", bomb()):
        with pytest.raises(DataError, match=r"a.jsonl:3: .* is not a readable image"):
            read(source, "a.jsonl:3")
    with pytest.raises(DataError, match="there is no image"):
        read(tmp_path / "missing.png", "a.jsonl:3")
