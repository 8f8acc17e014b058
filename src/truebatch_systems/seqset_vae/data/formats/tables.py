"""One table of a file as columns of pyarrow: CSV and TSV (also .gz), or Parquet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.parquet_files import check_unpacked, dense_bytes, open_parquet
from truebatch.io.text_encoding import nearest, open_content

TEXTS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
TABLES = (".csv", ".tsv", ".parquet", ".csv.gz", ".tsv.gz")


@dataclass(frozen=True, slots=True, eq=False)
class ColumnTable:
    """Columns of a file."""

    path: Path
    columns: dict[str, Any]
    """Name -> an array of pyarrow."""
    first_row: int
    """What the first of them is called in messages: row 0 of Parquet, line 2 of text with a header."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def need(self, name: str, *, setting: str) -> Any:
        """A column, or an error that says which there are and which setting names it."""
        if name not in self.columns:
            have = list(self.columns)
            raise DataError(
                f"{self.path} has no column {name!r}{nearest(name, have)}",
                seen=f"columns {', '.join(have[:8])}" + (f" and {len(have) - 8} more" if len(have) > 8 else ""),
                do=f"name the file's own column: --set {setting}=... (patient, time, variable, value, label)",
            )
        return self.columns[name]


def table_kind(path: Path) -> str:
    """The end of a file's name that says what it is, `.gz` with the one before."""
    ends = [end.lower() for end in path.suffixes]
    return "".join(ends[-2:]) if ends and ends[-1] == ".gz" else (ends[-1] if ends else "")


def read_table(path: Path, *, texts: Collection[str] = (), columns: Sequence[str] | None = None) -> ColumnTable:
    """A table; `texts` are columns that are names, whatever they look like. `columns` are read alone, as far as there."""
    if table_kind(path) == ".parquet":
        with open_parquet(path) as file:
            have = file.schema_arrow.names
            wanted = [n for n in have if not _is_vector(n) and (columns is None or n in columns)]
            nested = [name for name in wanted if _is_nested(file.schema_arrow.field(name).type)]
            if bad := [name for name in nested if name in (columns or texts)]:
                raise DataError(
                    f"the column {bad[0]!r} of {path} holds lists or structures",
                    seen=str(file.schema_arrow.field(bad[0]).type)[:80],
                    do="write one event per row, and one value per cell",
                )
            wanted = [name for name in wanted if name not in nested]
            table = file.read(columns=wanted)
        check_unpacked(path, sum(dense_bytes(column) for column in table.columns))
        return ColumnTable(path, {name: _plain(table.column(name)) for name in wanted}, first_row=0)
    table = _read_text(path, texts)
    kept = [n for n in table.column_names if columns is None or n in columns]
    return ColumnTable(path, {name: _plain(table.column(name)) for name in kept}, first_row=2)


def header_of(path: Path) -> list[str]:
    """The names of the columns of a table."""
    if table_kind(path) == ".parquet":
        with open_parquet(path) as file:
            return [str(name) for name in file.schema_arrow.names]
    with open_content(path) as file:
        first = file.readline(65536).decode("utf-8-sig", errors="replace")
    return [name.strip().strip('"') for name in first.rstrip("\r\n").split("\t" if "\t" in first else ",")]


def _is_nested(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_nested(kind))


def _is_vector(name: str) -> bool:
    """The carry-forward tool writes each variable's vector into every row, as v0, v1, ..."""
    return name[:1] == "v" and name[1:].isdigit()


def _plain(column: Any) -> Any:
    """One array instead of chunks, and words instead of numbers for them."""
    from pyarrow import compute, types

    joined = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    return compute.cast(joined, joined.type.value_type) if types.is_dictionary(joined.type) else joined


def _read_text(path: Path, texts: Collection[str]) -> Any:
    try:
        import pyarrow as arrow
        from pyarrow import csv
    except ImportError as error:
        raise DataError(
            "reading tables needs the package pyarrow", seen=f"{path}; {error}", do="pip install 'truebatch[data]'"
        ) from error
    delimiter = "\t" if ".tsv" in table_kind(path) else ","
    try:
        with open_content(path) as file:
            table = csv.read_csv(
                file if path.suffix.lower() == ".gz" else path,
                parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                # An empty name is a fault with its place; "NA" in a column of names is sodium and no missing value.
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(texts, arrow.string()), strings_can_be_null=False
                ),
            )
        names = table.column_names  # a header in another encoding is found when its names are asked for
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as a table",
            seen=next(iter(str(error).splitlines()), type(error).__name__)[:200],
            do="write one header line, then as many cells in every row; quote cells that hold the separator",
        ) from error
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"{path} has several columns of one name", seen=repr(twice[0]), do="give every column a name of its own"
        )
    return table
