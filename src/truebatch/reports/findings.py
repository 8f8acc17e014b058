"""What a run has found, kept beside it for its report: tables as JSON, pictures as SVG, in the order of their names.

runs/<name>/findings/{10-padding.json, 20-curves.svg, ...}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.reports.tables import Table
from truebatch.training.durable import read_json, write_json, write_text

FOLDER = "findings"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_MOST_BYTES = 1 << 22


def keep_table(run: Path, name: str, table: Table) -> Path:
    """Keep a table for the report of a run; one of the same name is replaced."""
    path = _place(run, name, ".json")
    write_json(path, asdict(table))
    return path


def keep_picture(run: Path, name: str, svg: str) -> Path:
    """Keep a picture (SVG text) for the report of a run; one of the same name is replaced."""
    path = _place(run, name, ".svg")
    write_text(path, svg)
    return path


def kept_findings(run: Path) -> Iterator[tuple[str, Table | str]]:
    """Tables, and pictures as SVG text, in the order of their names."""
    folder = run / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix == ".json":
            yield path.stem, _table(path, read_json(path, max_bytes=_MOST_BYTES))
        elif path.suffix == ".svg":
            yield path.stem, path.read_text(encoding="utf-8", errors="replace")[:_MOST_BYTES]


def _table(path: Path, values: Any) -> Table:
    try:
        header = tuple(str(cell) for cell in values["header"])
        rows = tuple(tuple(str(cell) for cell in row) for row in values["rows"])
        title = str(values.get("title", ""))
    except (TypeError, KeyError, AttributeError) as error:
        raise _not_a_table(path, f"{type(error).__name__}: {error}") from error
    uneven = [number for number, row in enumerate(rows) if len(row) != len(header)]
    if uneven:
        raise _not_a_table(path, f"row {uneven[0]} has {len(rows[uneven[0]])} cells, the header {len(header)}")
    return Table(header, rows, title)


def _not_a_table(path: Path, seen: str) -> DataError:
    return DataError(f"{path} does not hold a table", seen=seen, do="remove the file; the report does not need it")


def _place(run: Path, name: str, suffix: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a finding has a short name", seen=repr(name), do="use small letters, digits, - and _, as in 10-padding"
        )
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    return run / FOLDER / f"{name}{suffix}"
