"""Compressed data files: the same samples as unpacked, and an end to what a few bytes unpack to."""

from __future__ import annotations

import gzip
import json
import random
import zlib

import pyarrow
import pytest

from truebatch.errors import DataError
from truebatch.io import compressed_files, json_arrays
from truebatch.io.data_files import read_samples
from truebatch_systems.seqset_vae.data.formats.tables import read_table

SAMPLES = [
    {"text": "批 次 🚣", "input_ids": [1, 22, 333]}, "", 12, -3.5, None, [[], {"a": ["]", ",", "\\"]}], "x" * 300, {}, 7,
]  # fmt: skip


def pack(data: bytes, ending: str) -> bytes:
    return gzip.compress(data) if ending == "gz" else bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def bomb(number: int, piece: bytes) -> bytes:
    """`number` MiB of a piece, packed."""
    packer = zlib.compressobj(9, wbits=31)
    unit = piece * (2**20 // len(piece))
    return b"".join(packer.compress(unit) for _ in range(number)) + packer.flush()


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 16])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_read_in_any_pieces_gives_its_values(tmp_path, monkeypatch, ending, piece, indent):
    monkeypatch.setattr(json_arrays, "_PIECE", piece)
    text = " \n" + json.dumps(SAMPLES, indent=indent, ensure_ascii=False) + "\n"
    path = tmp_path / f"a.json.{ending}"
    path.write_bytes(pack(text.encode("utf-8-sig"), ending))
    assert list(read_samples(path)) == [(f"{path} [{n}]", value) for n, value in enumerate(SAMPLES)]


@pytest.mark.parametrize("text", ["", "  \n", "[]", " [ ] "])
def test_nothing_in_an_array(tmp_path, text):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert list(read_samples(path)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}', "must hold a JSON array"),
        ("[1, 2", r"\[2\] is not preceded by a comma"),
        ("[1 2]", r"\[1\] is not preceded by a comma"),
        ('["a", "b', r"\[1\] is not valid JSON"),
        ("[1,]", r"\[1\] is not valid JSON"),
        ("[1]\n[2]", "has more text after its array"),
        ("[" * 100_000, r"\[0\] is not valid JSON"),
        ("[" + "9" * 5000 + "]", r"\[0\] is not valid JSON"),
        ("[\0\0", r"\[0\] is not valid JSON"),
    ],
)
def test_what_is_wrong_in_an_array_is_named(tmp_path, text, said):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError, match=said):
        list(read_samples(path))


def test_one_value_of_an_array_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(json_arrays, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b'["' + random.Random(0).randbytes(300_000).hex().encode()))
    with pytest.raises(DataError, match="too long to be one sample"):
        list(read_samples(path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.json.gz", "a.csv.gz"])
def test_what_unpacks_without_an_end_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(compressed_files, "FREE_BYTES", 2**20)
    path = tmp_path / name
    path.write_bytes(bomb(64, b"\n"))
    with pytest.raises(DataError, match="unpacks to far more") as caught:
        list(read_samples(path))
    assert "a.csv" in name or int(caught.value.seen.split()[0].replace(",", "")) < 8 * 2**20


def test_a_table_that_unpacks_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed_files, "FREE_BYTES", 2**20)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"patient,minute,variable,value\n") + bomb(64, b"1,2,a,3\n"))
    with pytest.raises(DataError, match="unpacks to far more"):
        read_table(path)


def test_a_packed_table_is_the_table(tmp_path):
    rows = b"patient,minute,variable,value\n" + b"".join(b"%d,%d,a,3\n" % (n, n) for n in range(1000))
    for name, data in (("a.csv", rows), ("a.csv.gz", gzip.compress(rows))):
        (tmp_path / name).write_bytes(data)
    plain, packed = (read_table(tmp_path / name).columns for name in ("a.csv", "a.csv.gz"))
    assert {name: column.to_pylist() for name, column in plain.items()} == {
        name: column.to_pylist() for name, column in packed.items()
    }


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-30])
    with pytest.raises(DataError, match="cannot be unpacked"):
        list(read_samples(path))
