"""The results of a run as a table: a function of the run folder alone, a row for every sample of the input, in order.

input.jsonl + journal -> rows -> .jsonl, .csv, .parquet; the same bytes however often the run was interrupted
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from truebatch.errors import ConfigError, DataError
from truebatch.html_repr import html_table
from truebatch.io.atomic_files import atomic_write
from truebatch.progress import counted
from truebatch.scoring.batch_plan import load_batches
from truebatch.scoring.gc_pause import without_collecting
from truebatch.scoring.store.input_index import InputSample, load_list
from truebatch.scoring.store.journal import read_journals
from truebatch.scoring.store.manifest import read_manifest
from truebatch.scoring.store.outcome import Outcome
from truebatch.scoring.windows import window_folders

COLUMNS = ("index", "id", "status", "score", "output", "tokens", "stage", "kind", "message", "level", "meta")
FORMATS = (".jsonl", ".csv", ".parquet")
_ADDED = (
    "samples", "ok", "failed", "pending", "duplicates", "tokens", "tokens_done", "batches", "seconds", "suspects", "unchecked",
)  # fmt: skip
_JOINED = ("disagreements", "damaged")
"""What of the windows of a run is added, and what stands one after the other."""
PENDING = "pending"
"""The status of a sample that has no result yet."""
DAMAGED = "damaged"
"""The kind of a pending sample whose record is not what was written."""
_GROUP = 50_000
"""Rows of a group in a Parquet file."""

_FORMULA = re.compile("[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]|\\s+[=+\\-@]")
"""How a text begins that a spreadsheet carries out, also full-width and behind spaces."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Where a run stands, read from its folder; it may be running."""

    samples: int
    """Of the input, those of equal content each."""
    ok: int
    failed: int
    pending: int
    duplicates: int
    """Samples whose content had been there before."""
    kinds: dict[str, int]
    """Failed samples by `stage/kind`."""
    tokens: int
    tokens_done: int
    batches: int
    """Committed ones."""
    seconds: float
    """Spent in them, over all workers."""
    level: str
    suspects: int
    """Batches in which a worker died, not yet judged again."""
    disagreements: tuple[str, ...]
    """Keys with two different results under one configuration: this must not be."""
    damaged: tuple[str, ...] = ()
    """Pending samples whose record is not what was written, as `id (journal)`."""
    unchecked: int = 0
    """Records of an earlier version, without a checksum: whether they are what was written cannot be said."""

    def _repr_html_(self) -> str:
        return html_table([(name, getattr(self, name)) for name in self.__dataclass_fields__])


def read_rows(run: Path) -> Iterator[Row]:
    """A row for every sample of the input, in order, whatever its state; memory holds one window."""
    level = _level(run)
    for folder in window_folders(run):
        with without_collecting():
            journals, listed = read_journals(folder), load_list(folder)
        for one in listed:
            yield make_row(one, journals.results.get(one.key), level, damaged=journals.damaged.get(one.key, ""))


def export(run: Path, file: Path, *, for_spreadsheet: bool = False) -> int:
    """Write all rows to a .jsonl, .csv or .parquet file, whole or not at all; how many there are.

    `for_spreadsheet`: a text in a .csv that a spreadsheet would take for a formula begins with a quote instead.
    """
    return write_rows(read_rows(run), file, for_spreadsheet=for_spreadsheet)


def write_rows(given: Iterable[Row], file: Path, *, for_spreadsheet: bool = False) -> int:
    """Write rows with the columns of an export to a .jsonl, .csv or .parquet file, whole or not at all."""
    kind = file.suffix.lower()
    if kind not in FORMATS:
        raise ConfigError(
            f"an export is one of {', '.join(FORMATS)}", seen=f"{file.name!r}", do="name the file scores.jsonl"
        )
    if for_spreadsheet and kind != ".csv":
        raise ConfigError(
            "only a .csv is quoted for spreadsheets", seen=f"{file.name!r}", do="name a .csv, or leave the option away"
        )
    as_csv = partial(_csv, cell=partial(_cell, quoted=for_spreadsheet))
    ways: dict[str, Callable[[Iterable[Row], IO[bytes]], None]] = {
        ".jsonl": _jsonl, ".csv": as_csv, ".parquet": _parquet
    }  # fmt: skip
    rows = _Counted(counted(given, f"writing {file.name}, rows"))
    try:
        with atomic_write(file) as draft:
            ways[kind](rows, draft)
    except OSError as error:
        raise DataError(f"{file} cannot be written", seen=str(error), do="choose a folder that exists") from error
    return rows.number


def read_damaged(run: Path) -> tuple[str, ...]:
    """Samples whose record in a journal is not what was written, as `id (journal)`."""
    out: list[str] = []
    for folder in window_folders(run):
        damaged = read_journals(folder).damaged
        out += _named(damaged, load_list(folder)) if damaged else []
    return tuple(out)


def _named(damaged: Mapping[str, str], listed: Iterable[InputSample]) -> list[str]:
    return [f"{one.id} ({damaged[one.key]})" for one in listed if one.key in damaged]


def read_status(run: Path) -> Status:
    """Counts over the samples of the input, and what the journals of all windows say."""
    level = _level(run)
    parts = [_window_status(folder, level) for folder in window_folders(run)]
    kinds = Counter[str]()
    for part in parts:
        kinds.update(part.kinds)
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _ADDED}
    lists: dict[str, Any] = {
        name: tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in _JOINED
    }
    return Status(**sums, **lists, kinds=dict(sorted(kinds.items())), level=level)


def _window_status(run: Path, level: str) -> Status:
    with without_collecting():
        listed, journals, tokens = load_list(run), read_journals(run), load_batches(run).tokens or {}
    states, kinds = Counter[str](), Counter[str]()
    for one in listed:
        status, stage, kind = journals.results.state(one.key) or (PENDING, "", "")
        states[status] += 1
        if status == "failed":
            kinds[f"{stage}/{kind}"] += 1
    keys = {one.key for one in listed}
    return Status(
        samples=len(listed), ok=states["ok"], failed=states["failed"], pending=states[PENDING],
        duplicates=len(listed) - len(keys), kinds=dict(sorted(kinds.items())),
        tokens=sum(number for key, number in tokens.items() if key in keys),
        tokens_done=sum(number for key, number in tokens.items() if key in keys and key in journals.results),
        batches=journals.batches, seconds=journals.seconds, level=level, suspects=len(journals.suspects),
        disagreements=journals.disagreements, unchecked=journals.unchecked,
        damaged=tuple(_named(journals.damaged, listed)),
    )  # fmt: skip


def _level(run: Path) -> str:
    return str(read_manifest(run).fields["sameness"]["level"])


def make_row(one: InputSample, outcome: Outcome | None, level: str, *, damaged: str = "") -> Row:
    """The row of a sample; without an outcome it is pending. `damaged` is the journal whose record was changed."""
    about = {"index": one.index, "id": one.id, "level": level, "meta": dict(one.meta)}
    if outcome is None:
        kind, message = (DAMAGED, _damage(damaged)) if damaged else ("", "")
        found: Row = {"status": PENDING, "score": None, "output": {}, "tokens": 0, "stage": ""}
        found |= {"kind": kind, "message": message}
    else:
        names = ("status", "score", "tokens", "stage", "kind", "message")
        found = {"output": dict(outcome.output), **{name: getattr(outcome, name) for name in names}}
    values = {**about, **found}
    return {name: values[name] for name in COLUMNS}


def _damage(journal: str) -> str:
    return f"its record in {journal} is not what was written; the run judges it again when it is resumed"


class _Counted:
    """Rows, and how many there were."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows, self.number = rows, 0

    def __iter__(self) -> Iterator[Row]:
        for row in self._rows:
            self.number += 1
            yield row


def _jsonl(rows: Iterable[Row], out: IO[bytes]) -> None:
    for row in rows:
        out.write(json.dumps(row, allow_nan=False).encode() + b"\n")


def _csv(rows: Iterable[Row], out: IO[bytes], cell: Callable[[Any], Any]) -> None:
    text = io.TextIOWrapper(out, encoding="utf-8", errors="replace", newline="")
    writer = csv.writer(text, lineterminator="\n")
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(COLUMNS)
    for row in rows:
        cells = [cell(row[name]) for name in COLUMNS]
        # A carriage return ends a row for every reader, and the plain writer does not quote it.
        (quoting if any(isinstance(one, str) and "\r" in one for one in cells) else writer).writerow(cells)
    text.flush()
    text.detach()


def _cell(value: Any, *, quoted: bool) -> Any:
    """A value as text; `quoted`, a text that could be a formula is none. Numbers stay numbers, -1.5 too."""
    if isinstance(value, dict):
        return json.dumps(value, allow_nan=False)
    if quoted and isinstance(value, str) and _FORMULA.match(value):
        return f"'{value}"
    return repr(value) if isinstance(value, float) else value


def _parquet(rows: Iterable[Row], out: IO[bytes]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            "writing Parquet needs pyarrow", seen=str(error), do="pip install 'truebatch[data]'"
        ) from error
    whole, text = pyarrow.int64(), pyarrow.string()
    kinds = dict.fromkeys(COLUMNS, text) | {"index": whole, "tokens": whole, "score": pyarrow.float64()}
    schema = pyarrow.schema(list(kinds.items()))
    left = iter(rows)
    with parquet.ParquetWriter(out, schema) as writer:
        while group := list(islice(left, _GROUP)):
            flat = [{name: json.dumps(v) if isinstance(v, dict) else v for name, v in row.items()} for row in group]
            writer.write_table(pyarrow.Table.from_pylist(flat, schema=schema))
