"""The results of a run as a table: a function of the run folder alone, a row for every sample of the input, in order.

input.jsonl + journal -> rows -> .jsonl, .csv, .parquet; the same bytes however often the run was interrupted
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.scoring.batching import load_batches
from truebatch.scoring.journal import Told, read_journals
from truebatch.scoring.listing import Listed, load_list
from truebatch.scoring.manifest import read_manifest
from truebatch.scoring.records import Outcome
from truebatch.training.durable import write_bytes

COLUMNS = ("index", "id", "status", "score", "output", "tokens", "stage", "kind", "message", "level", "meta")
FORMATS = (".jsonl", ".csv", ".parquet")
PENDING = "pending"
"""The status of a sample that has no result yet."""

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


def read_rows(run: Path) -> Iterator[Row]:
    """A row for every sample of the input, in order, whatever its state."""
    level = _level(run)
    told = read_journals(run)
    for one in load_list(run):
        yield _row(one, told.results.get(one.key), level)


def export(run: Path, file: Path) -> int:
    """Write all rows to a .jsonl, .csv or .parquet file, whole or not at all; how many there are."""
    kind = file.suffix.lower()
    if kind not in FORMATS:
        raise ConfigError(
            f"an export is one of {', '.join(FORMATS)}", seen=f"{file.name!r}", do="name the file scores.jsonl"
        )
    rows = list(read_rows(run))
    data = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}[kind](rows)
    try:
        write_bytes(file, data)
    except OSError as error:
        raise DataError(f"{file} cannot be written", seen=str(error), do="choose a folder that exists") from error
    return len(rows)


def read_status(run: Path) -> Status:
    """Counts over the samples of the input, and what the journals say."""
    level, listed, told, tokens = _level(run), load_list(run), read_journals(run), load_batches(run).tokens or {}
    states = Counter(_state(one, told) for one in listed)
    kinds = Counter(
        f"{o.stage}/{o.kind}" for one in listed if (o := told.results.get(one.key)) and o.status == "failed"
    )
    keys = {one.key for one in listed}
    return Status(
        samples=len(listed), ok=states["ok"], failed=states["failed"], pending=states[PENDING],
        duplicates=len(listed) - len(keys), kinds=dict(sorted(kinds.items())),
        tokens=sum(number for key, number in tokens.items() if key in keys),
        tokens_done=sum(number for key, number in tokens.items() if key in keys and key in told.results),
        batches=told.batches, seconds=told.seconds, level=level, suspects=len(told.suspects),
        disagreements=told.disagreements,
    )  # fmt: skip


def _state(one: Listed, told: Told) -> str:
    outcome = told.results.get(one.key)
    return PENDING if outcome is None else outcome.status


def _level(run: Path) -> str:
    return str(read_manifest(run).fields["sameness"]["level"])


def _row(one: Listed, outcome: Outcome | None, level: str) -> Row:
    about = {"index": one.index, "id": one.id, "level": level, "meta": dict(one.meta)}
    if outcome is None:
        found: Row = {
            "status": PENDING,
            "score": None,
            "output": {},
            "tokens": 0,
            "stage": "",
            "kind": "",
            "message": "",
        }
    else:
        names = ("status", "score", "tokens", "stage", "kind", "message")
        found = {"output": dict(outcome.output), **{name: getattr(outcome, name) for name in names}}
    values = {**about, **found}
    return {name: values[name] for name in COLUMNS}


def _jsonl(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def _csv(rows: list[Row]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in COLUMNS])
    return text.getvalue().encode("utf-8", "replace")


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value, allow_nan=False)
    return repr(value) if isinstance(value, float) else value


def _parquet(rows: list[Row]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            "writing Parquet needs pyarrow", seen=str(error), do="pip install 'truebatch[data]'"
        ) from error
    whole, text = pyarrow.int64(), pyarrow.string()
    kinds = dict.fromkeys(COLUMNS, text) | {"index": whole, "tokens": whole, "score": pyarrow.float64()}
    flat = [{name: json.dumps(v) if isinstance(v, dict) else v for name, v in row.items()} for row in rows]
    table = pyarrow.Table.from_pylist(flat, schema=pyarrow.schema(list(kinds.items())))
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()
