"""Parquet files: opened, and read in batches whose memory has an end. A page of a few bytes can hold a billion cells.

Texts stay in dictionaries, as the file has them, until their rows are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from truebatch.errors import DataError
from truebatch.io.compressed_files import MOST_RATIO
from truebatch.io.text_encoding import MAX_LINE_BYTES, open_file

FREE_BYTES = 256 * 2**20
"""So many bytes of cells are read of every file, however small it is."""
_BATCH_ROWS = 4096
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_INDEX = 4
"""Bytes of a text that stands in a dictionary."""


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A Parquet file, opened by pyarrow; what cannot be read, or holds far more than it should, raises `DataError`."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            "reading Parquet needs the package pyarrow",
            seen=f"{path}; {error}",
            do="pip install 'truebatch[data]'",
        ) from error
    open_file(path).close()
    try:
        with parquet.ParquetFile(path) as file:
            texts = [field.name for field in file.schema_arrow if _is_text(field.type)]
            _check_cells(path, file.metadata)
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            yield file
    except (arrow.ArrowException, OSError) as error:
        size = path.stat().st_size
        raise DataError(
            f"{path} cannot be read as Parquet" + ("; it is empty" if not size else ""),
            seen=f"{size:,} bytes: {next(iter(str(error).splitlines()), type(error).__name__)[:200]}",
            do="write or copy the file again; it is damaged or incomplete",
        ) from error


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _check_cells(path: Path, about: Any) -> None:
    """Refuse a file whose cells would take far more memory than it has bytes."""
    total = 0
    for group in range(about.num_row_groups):
        row_group = about.row_group(group)
        for at in range(row_group.num_columns):
            column = row_group.column(at)
            total += column.num_values * _WIDTHS.get(column.physical_type, _INDEX) + column.total_uncompressed_size
    check_unpacked(path, total)


def check_unpacked(path: Path, num_bytes: int) -> None:
    """Refuse so many bytes out of a file of this size."""
    if num_bytes > max(FREE_BYTES, MOST_RATIO * path.stat().st_size):
        _refuse(path, num_bytes)


def _refuse(path: Path, num_bytes: int) -> NoReturn:
    raise DataError(
        f"{path} unpacks to far more than texts and tables do",
        seen=f"{num_bytes:,} bytes out of {path.stat().st_size:,}; at most {MOST_RATIO} times as many are read",
        do="if it should, write it without compression, or in several smaller files",
    )


def dense_bytes(column: Any) -> int:
    """What the texts of a column take once each row has its own; 0 for other columns."""
    from pyarrow import compute

    if not (_is_dictionary(column.type) and _is_text(column.type.value_type)):
        return int(compute.sum(compute.binary_length(column)).as_py() or 0) if _is_text(column.type) else 0
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    return sum(int(compute.sum(compute.binary_length(c.dictionary).take(c.indices)).as_py() or 0) for c in chunks)


def _is_dictionary(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_dictionary(kind))


def read_rows(path: Path, columns: Collection[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every row with its number. A list of integers comes as a `range` of the same length."""
    row = total = 0
    with open_parquet(path) as file:
        wanted = [c for c in columns if c in file.schema_arrow.names] if columns is not None else None
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
            longest = _longest_text(batch, path, row)
            total += sum(dense_bytes(column) for column in batch.columns)
            check_unpacked(path, total)
            step = max(1, min(_BATCH_ROWS, MAX_LINE_BYTES // max(longest, 1)))
            for first in range(0, batch.num_rows, step):
                for sample in _plain_rows(batch.slice(first, step)):
                    yield row, sample
                    row += 1


def _longest_text(batch: Any, path: Path, first: int) -> int:
    """Bytes of the longest text of a batch, under the limit of a text line."""
    from pyarrow import compute

    longest = 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        texts = column.dictionary if _is_dictionary(column.type) else column
        if not _is_text(texts.type):
            continue
        most = compute.max(compute.binary_length(texts)).as_py() or 0
        if most > MAX_LINE_BYTES:
            raise DataError(
                f"{path} holds a text that is too long to be one sample",
                seen=f"column {name!r}, rows {first:,} to {first + len(column) - 1:,}: {most:,} bytes in one cell, "
                f"at most {MAX_LINE_BYTES:,}",
                do="write one sample per row",
            )
        longest = max(longest, most)
    return longest


def _plain_rows(batch: Any) -> Iterator[dict[str, Any]]:
    from pyarrow import compute, types

    columns: dict[str, Sequence[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_list = types.is_list(column.type) or types.is_large_list(column.type)
        if is_list and types.is_integer(column.type.value_type):
            sizes = compute.list_value_length(column).to_pylist()
            columns[name] = [None if size is None else range(size) for size in sizes]
        else:
            columns[name] = column.to_pylist()
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
