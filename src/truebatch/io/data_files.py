"""Read the samples of a data file one by one, each with its location.

.jsonl .ndjson   one JSON value per line, streamed
.json            one JSON array
.csv .tsv        a header line, then one sample per row, streamed
.parquet         one sample per row, streamed in batches
.txt             one text per line, streamed: {"text": line}; lines without a letter are left out

All but Parquet also with .gz or .zst behind.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from truebatch.errors import DataError
from truebatch.io.compressed_files import COMPRESSED
from truebatch.io.json_arrays import stream_array
from truebatch.io.parquet_files import read_rows
from truebatch.io.text_encoding import MAX_LINE_BYTES, read_lines, read_text, unpacked_suffix

MAX_JSON_BYTES = 4 * 2**30
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")

_HEADER = re.compile(r"[A-Za-z_]\w*([,\t][\w ]+)+")

Placed = tuple[str, Any]


def is_data_file(name: str) -> bool:
    """True if the file extension is one that can be measured."""
    return unpacked_suffix(Path(name)) in FORMATS


def read_samples(path: Path, *, columns: Sequence[str] | None = None) -> Iterator[Placed]:
    """Every sample of a data file with its location ("file:line"), in file order.

    `columns` are the only ones a caller looks at; Parquet reads no others. In Parquet a list of integers
    comes as a `range` of the same length: its entries are not needed to measure it.
    """
    kind = unpacked_suffix(path)
    if kind in (".jsonl", ".ndjson"):
        return _read_jsonl(path)
    if kind == ".json":
        return _read_json(path)
    if kind in (".csv", ".tsv"):
        return _read_csv(path, delimiter="\t" if kind == ".tsv" else ",")
    if kind == ".parquet" and path.suffix.lower() == ".parquet":
        return ((f"{path} row {row}", sample) for row, sample in read_rows(path, columns))
    if kind == ".txt":
        return ((f"{path}:{number}", {"text": text}) for number, text in read_texts(path))
    raise DataError(
        f"{path} is in a format that is not supported",
        seen=f"its name ends in {kind!r}",
        do=f"use one of {' '.join(FORMATS)}",
    )


def read_texts(path: Path, *, until: str = "line") -> Iterator[tuple[int, str]]:
    """The texts of a plain file with the line each begins at; blank ones are left out.

    `until` says where one ends: at the end of its `line`, at a blank line (`paragraph`), or at a line that is this
    word and nothing else, such as `%`.
    """
    first, lines = 0, list[str]()
    for number, line in read_lines(path):
        is_end = not line.strip() if until == "paragraph" else line.rstrip("\r\n") == until
        if until == "line":
            first, lines = number, [line]
        elif not is_end:
            first = first if lines else number
            lines.append(line)
        if is_end or until == "line":
            yield from _joined(first, lines)
            lines = []
    yield from _joined(first, lines)


def _joined(first: int, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    text = "".join(lines).strip("\r\n")
    if text.strip():
        yield first, text


def _read_jsonl(path: Path) -> Iterator[Placed]:
    for number, line in read_lines(path):
        if line.isspace():
            continue
        if number == 1 and line.lstrip().startswith("[") and not line.rstrip().endswith("]"):
            raise DataError(
                f"{path} is a JSON array, not one JSON value per line",
                seen=f"line 1 begins {line[:40]!r}",
                do=f"name it {path.stem}.json",
            )
        if number == 1 and _is_header(line):
            raise DataError(
                f"{path}:1 is not JSON; it looks like the header of a table",
                seen=repr(line.rstrip()[:60]),
                do=f"name it {path.stem}.{'tsv' if chr(9) in line else 'csv'}",
            )
        yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _is_header(line: str) -> bool:
    """Names separated by commas or tabs: a CSV file with the wrong extension."""
    return _HEADER.fullmatch(line.rstrip()) is not None


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg
        raise DataError(
            f"{place} is not valid JSON" + ("; it looks cut off" if cut else ""),
            seen=f"{error.msg} at column {error.colno}: {text[max(0, error.pos - 20) : error.pos + 20]!r}",
            do="write that line again, or remove it" if not cut else "copy or write the file again, it is incomplete",
        ) from error
    except (RecursionError, ValueError) as error:
        raise DataError(
            f"{place} holds JSON that cannot be read", seen=str(error), do="remove the deep nesting or the huge number"
        ) from error


def _read_json(path: Path) -> Iterator[Placed]:
    if path.suffix.lower() in COMPRESSED:
        yield from ((f"{path} [{index}]", sample) for index, sample in enumerate(stream_array(path)))
        return
    text = read_text(path, max_bytes=MAX_JSON_BYTES)
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise DataError(
                f"{path}:{error.lineno} has more text after the end of the JSON value",
                seen=repr(text[error.pos : error.pos + 40]),
                do=f"if it holds one JSON value per line, name it {path.stem}.jsonl",
            ) from error
        _parse_array_error(path, text, error)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path} holds JSON that cannot be read", seen=str(error), do="remove the nesting") from error
    if not isinstance(value, list):
        keys = f" with the keys {', '.join(list(value)[:8])}" if isinstance(value, dict) else ""
        raise DataError(
            f"{path} must hold a JSON array of samples",
            seen=f"a {type(value).__name__}{keys}",
            do="write a list [...], or one sample per line as .jsonl",
        )
    for index, sample in enumerate(value):
        yield f"{path} [{index}]", sample


def _parse_array_error(path: Path, text: str, error: json.JSONDecodeError) -> NoReturn:
    cut = error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg
    raise DataError(
        f"{path}:{error.lineno} is not valid JSON" + ("; it looks cut off" if cut else ""),
        seen=f"{error.msg}: {text[max(0, error.pos - 20) : error.pos + 20]!r}",
        do="write the file again" if cut else "correct that line",
    ) from error


def _read_csv(path: Path, *, delimiter: str) -> Iterator[Placed]:
    lines = (line for _, line in read_lines(path))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    with _long_cells():
        try:
            header = next(reader, None)
            for row in reader:
                if row:
                    place = f"{path}:{reader.line_num}"
                    yield place, _named(header or [], row, place)
        except csv.Error as error:
            raise DataError(
                f"{path}:{reader.line_num} is not valid CSV",
                seen=str(error),
                do='close every quote; a quote inside a quoted cell is written ""',
            ) from error


def _named(header: list[str], row: list[str], place: str) -> dict[str, str]:
    if len(row) != len(header):
        raise DataError(
            f"{place} has {len(row)} cells, the header has {len(header)}",
            seen=f"header {header[:6]}, row {[cell[:20] for cell in row[:6]]}",
            do="quote cells that contain the separator",
        )
    return dict(zip(header, row, strict=True))


@contextmanager
def _long_cells() -> Iterator[None]:
    # The csv module refuses cells of more than 128 KiB by default; a document is easily longer.
    before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)
