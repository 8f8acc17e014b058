"""Tables and galleries (JSON) and pictures (SVG) saved in the run folder for its report, in order of their names.

runs/<name>/findings/{10-padding.json, 20-curves.svg, ...}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.io.atomic_files import read_json, write_json, write_text
from truebatch.io.text_encoding import read_start
from truebatch.reports.gallery import Exhibit, plain_exhibit, read_exhibit
from truebatch.reports.tables import Table

FOLDER = "findings"


@dataclass(frozen=True, slots=True)
class Gallery:
    """Samples saved for viewing."""

    title: str
    exhibits: Sequence[Exhibit]


_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_MOST_BYTES = 1 << 22


def keep_table(run: Path, name: str, table: Table) -> Path:
    """Save a table for the report of a run, replacing one of the same name."""
    path = _place(run, name, ".json")
    write_json(path, asdict(table))
    return path


def keep_picture(run: Path, name: str, svg: str) -> Path:
    """Save a picture (SVG text) for the report of a run, replacing one of the same name.

    Characters invalid in XML are replaced: with one control character, no browser would show the picture.
    """
    path = _place(run, name, ".svg")
    write_text(path, _NOT_XML.sub("\ufffd", svg))
    return path


def keep_gallery(run: Path, name: str, exhibits: Sequence[Exhibit], *, title: str) -> Path:
    """Save samples with their pictures, which are files of the run named relative to its folder."""
    path = _place(run, name, ".json")
    write_json(path, {"title": title, "gallery": [plain_exhibit(exhibit) for exhibit in exhibits]})
    return path


def kept_findings(run: Path) -> Iterator[tuple[str, Table | Gallery | str]]:
    """Tables, galleries, and pictures as SVG text, in the order of their names."""
    folder = run / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix == ".json":
            values = read_json(path, max_bytes=_MOST_BYTES)
            is_gallery = isinstance(values, dict) and "gallery" in values
            yield path.stem, _gallery(run, path, values) if is_gallery else _table(path, values)
        elif path.suffix == ".svg":
            yield path.stem, read_start(path, max_bytes=_MOST_BYTES)


def _table(path: Path, values: Any) -> Table:
    try:
        header = tuple(str(cell) for cell in values["header"])
        rows = tuple(tuple(str(cell) for cell in row) for row in values["rows"])
        title = str(values.get("title", ""))
    except (TypeError, KeyError, AttributeError) as error:
        raise _not_a_table(path, f"{type(error).__name__}: {error}") from error
    uneven = [number for number, row in enumerate(rows) if len(row) != len(header)]
    if uneven:
        raise _not_a_table(path, f"row {uneven[0]} has {len(rows[uneven[0]])} cells, but the header has {len(header)}")
    return Table(header, rows, title)


def _gallery(run: Path, path: Path, values: Any) -> Gallery:
    try:
        return Gallery(str(values["title"]), [read_exhibit(one, run) for one in values["gallery"]])
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} does not hold a gallery",
            seen=f"{type(error).__name__}: {error}",
            do="remove the file; the report does not need it",
        ) from error


def _not_a_table(path: Path, seen: str) -> DataError:
    return DataError(f"{path} does not hold a table", seen=seen, do="remove the file; the report does not need it")


def _place(run: Path, name: str, suffix: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a finding needs a short name",
            seen=repr(name),
            do="use lowercase letters, digits, - and _, as in 10-padding",
        )
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    return run / FOLDER / f"{name}{suffix}"
