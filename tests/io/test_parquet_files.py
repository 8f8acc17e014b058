"""Parquet files: the rows that were written, and an end to what a few bytes unpack to."""

from __future__ import annotations

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from truebatch.errors import DataError
from truebatch.io import parquet_files
from truebatch.io.data_files import read_samples
from truebatch_systems.seqset_vae.data.formats.tables import read_table


def rows(path, **columns):
    return [sample for _, sample in read_samples(path, **columns)]


@pytest.mark.parametrize("use_dictionary", [True, False])
@pytest.mark.parametrize("limit", [8, 64 * 2**20])
def test_rows_are_those_that_were_written(tmp_path, monkeypatch, use_dictionary, limit):
    monkeypatch.setattr(parquet_files, "_BATCH_ROWS", 7)
    monkeypatch.setattr(parquet_files, "MAX_LINE_BYTES", max(limit, 8))
    texts = [None if n % 7 == 3 else "批 a b c"[: n % 5] for n in range(100)]
    table = {
        "text": texts, "wide": pyarrow.array(texts, pyarrow.large_string()), "number": list(range(100)),
        "kind": pyarrow.array(texts).dictionary_encode(), "input_ids": [[1] * (n % 4) for n in range(100)],
        "turns": [[{"role": "user", "content": "a"}]] * 100,
    }  # fmt: skip
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet", use_dictionary=use_dictionary, row_group_size=30)
    found = rows(tmp_path / "a.parquet")
    expected = [dict(zip(table, values, strict=True)) for values in zip(
        texts, texts, range(100), texts, (range(n % 4) for n in range(100)), table["turns"], strict=True
    )]  # fmt: skip
    assert found == expected
    assert rows(tmp_path / "a.parquet", columns=["number", "other"]) == [{"number": n} for n in range(100)]
    plain = read_table(tmp_path / "a.parquet", columns=["text", "kind", "number"]).columns
    assert {name: column.to_pylist() for name, column in plain.items()} == {
        "text": texts, "kind": texts, "number": list(range(100)),
    }  # fmt: skip


def many_rows(path):
    column = pyarrow.DictionaryArray.from_arrays(np.zeros(1_000_000, np.int8), ["x"])
    parquet.write_table(pyarrow.table({"text": column}), path)


def one_text_often(path):
    column = pyarrow.DictionaryArray.from_arrays(np.zeros(5_000, np.int32), ["x" * 20_000])
    parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd")


def one_list(path):
    column = pyarrow.ListArray.from_arrays([0, 1_000_000], np.zeros(1_000_000, np.int32))
    parquet.write_table(pyarrow.table({"input_ids": column}), path)


def one_page(path):
    parquet.write_table(pyarrow.table({"text": ["x" * 4_000_000]}), path, compression="zstd", use_dictionary=False)


@pytest.mark.parametrize("make", [many_rows, one_text_often, one_list, one_page])
def test_a_file_of_far_more_cells_than_bytes_is_refused(tmp_path, monkeypatch, make):
    monkeypatch.setattr(parquet_files, "FREE_BYTES", 2**20)
    make(tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    with pytest.raises(DataError, match="unpacks to far more"):
        rows(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="unpacks to far more"):
        read_table(tmp_path / "a.parquet")
