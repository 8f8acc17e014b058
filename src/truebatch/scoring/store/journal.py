"""The journal of a run: one SQLite file a worker, batches and their results committed together.

A kill at any moment loses at most the batch a worker was on; a power failure at most the last second of quick batches
beside it, since the disk is waited for once a second at most. What was begun and not committed by a worker that is
gone is suspect: it may hold a sample that ends the interpreter. Every record carries a checksum; one that is not what
was written is no result, and is named.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from truebatch.errors import RunError, TruebatchError
from truebatch.io.atomic_files import to_json
from truebatch.io.text_encoding import open_file
from truebatch.scoring.store.checksums import Record, is_whole, record_checksum
from truebatch.scoring.store.outcome import Outcome
from truebatch.testing.failpoints import failpoint

FOLDER: Final = "journal"
_NETWORK = ("nfs", "cifs", "smb", "lustre", "beegfs", "gpfs", "ceph", "fuse", "9p", "afs", "glusterfs")
_BUSY_SECONDS = 30.0
SYNC_SECONDS = 1.0
"""Batches quicker than this share one wait for the disk; closing waits too."""
_LOG_PAGES = 8192
"""Of the log, 32 MiB, before they are brought into the file; what is committed is in the log already."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS worker (name TEXT, host TEXT, pid INTEGER, born REAL);
CREATE TABLE IF NOT EXISTS batches (
    id INTEGER PRIMARY KEY, number INTEGER NOT NULL, attempt INTEGER NOT NULL, keys TEXT NOT NULL,
    started REAL NOT NULL, committed REAL, seconds REAL
);
CREATE TABLE IF NOT EXISTS results (
    key TEXT NOT NULL, batch INTEGER NOT NULL REFERENCES batches(id), status TEXT NOT NULL, score REAL,
    output TEXT NOT NULL, tokens INTEGER NOT NULL, stage TEXT NOT NULL, kind TEXT NOT NULL, message TEXT NOT NULL,
    attempts INTEGER NOT NULL, checksum TEXT NOT NULL DEFAULT '', PRIMARY KEY (key, batch)
) WITHOUT ROWID;
"""
_COLUMNS = "key, batch, status, score, output, tokens, stage, kind, message, attempts"
_CHECKSUM = "checksum"
_TEXTS = {str}
_quoted = json.encoder.encode_basestring_ascii
Place = tuple[float, str, int]
"""When a record was committed, its journal and its batch there: of two, the earlier is the smaller."""


@dataclass(frozen=True, slots=True)
class CrashedBatch:
    """A batch that was begun by a worker that is gone, and never committed."""

    number: int
    """Of the batch in the plan."""
    attempt: int
    keys: tuple[str, ...]


class Results(Mapping[str, Outcome]):
    """Results as they stand in journals; an outcome is made of a record when it is asked for."""

    def __init__(self, records: Mapping[str, Record]) -> None:
        self.records = records

    def __getitem__(self, key: str) -> Outcome:
        return _outcome(self.records[key])

    def state(self, key: str) -> tuple[str, str, str] | None:
        """Status, stage and kind of a key; None where it has no result."""
        record = self.records.get(key)
        return None if record is None else (record[2], record[6], record[7])

    def __contains__(self, key: object) -> bool:
        return key in self.records

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True, slots=True)
class JournalState:
    """What all journals of a run say together."""

    results: Results = field(default_factory=lambda: Results({}))
    """By key: the first success, else the last failure."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Keys without a result since their record is not what was written, and the journal it is in."""
    unchecked: int = 0
    """Records without a checksum: earlier versions wrote none."""
    suspects: tuple[CrashedBatch, ...] = ()
    disagreements: tuple[str, ...] = ()
    """Keys with two successes of different value: under one configuration that must not be."""
    batches: int = 0
    """Committed ones."""
    seconds: float = 0.0
    """Spent in committed batches, over all workers."""


class Journal:
    """The file of one worker, open for writing. Only its own worker writes to it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._synced = -math.inf
        self._is_wal = connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        self.path = path

    def begin(self, number: int, keys: Sequence[str], *, attempt: int = 1) -> int:
        """Note that a batch of the plan is begun; its id in this journal."""
        values = (number, attempt, to_json(list(keys)), time.time())
        # A beginning must outlive the process, not the machine: in a write-ahead log that needs no fsync.
        with self._writing("NORMAL" if self._is_wal else "FULL"):
            cursor = self._connection.execute(
                "INSERT INTO batches (number, attempt, keys, started) VALUES (?, ?, ?, ?)", values
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def commit(self, batch: int, outcomes: Sequence[Outcome], *, seconds: float) -> None:
        """Write the results of a batch, all or none; they outlive the process from here on."""
        rows = [_row(batch, outcome) for outcome in outcomes]
        failpoint("journal.before_commit")
        is_due = not self._is_wal or time.monotonic() - self._synced >= SYNC_SECONDS
        with self._writing("FULL" if is_due else "NORMAL"):
            self._connection.executemany(f"INSERT INTO results VALUES ({', '.join('?' * 11)})", rows)  # noqa: S608
            self._connection.execute(
                "UPDATE batches SET committed = ?, seconds = ? WHERE id = ?", (time.time(), seconds, batch)
            )
            failpoint("journal.in_commit")
        self._synced = time.monotonic() if is_due else self._synced
        failpoint("journal.committed")

    @contextmanager
    def _writing(self, synchronous: str) -> Iterator[None]:
        try:
            self._connection.execute(f"PRAGMA synchronous={synchronous}")
            with self._connection:
                yield
        except sqlite3.Error as error:
            raise _cannot_write(self.path, error) from error


@contextmanager
def open_journal(run: Path, *, worker: str = "0") -> Iterator[Journal]:
    """A new journal file of a run for one worker, closed at the end of the block."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"worker-{worker}-{uuid.uuid4().hex[:8]}.db"
    try:
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
        connection.execute(f"PRAGMA journal_mode={'DELETE' if is_network(folder) else 'WAL'}")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
        with connection:
            connection.executescript(_SCHEMA)
            born = psutil.Process().create_time()
            connection.execute(
                "INSERT INTO worker VALUES (?, ?, ?, ?)", (worker, socket.gethostname(), os.getpid(), born)
            )
    except sqlite3.Error as error:
        raise _cannot_write(path, error) from error
    try:
        yield Journal(connection, path)
    finally:
        connection.close()


def read_journals(run: Path) -> JournalState:
    """What all workers of a run have written so far. Nothing is changed; workers may be writing."""
    found, suspects, batches, seconds = _Found(), list[CrashedBatch](), 0, 0.0
    for path in sorted((run / FOLDER).glob("worker-*.db")):
        with _unreadable_named(path), closing(_reading(path)) as connection:
            if not _has_tables(connection):
                continue
            _add_records(found, path.name, connection)
            suspects += _suspects(connection)
            done = connection.execute("SELECT COUNT(*), SUM(seconds) FROM batches WHERE committed IS NOT NULL")
            number, spent = done.fetchone()
            batches, seconds = batches + number, seconds + (spent or 0.0)
    damaged = found.settle_damaged()
    results = Results({**found.records["failed"], **found.records["ok"]})
    left = tuple(s for s in suspects if not all(key in results for key in s.keys))
    disagreements = tuple(sorted(found.disagreements))
    return JournalState(results, damaged, found.unchecked, left, disagreements, batches, seconds)


class _Found:
    """The records of all journals: of each key the first success and the last failure, and what is damaged."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Record]] = {"ok": {}, "failed": {}}
        self.places: dict[str, dict[str, Place]] = {"ok": {}, "failed": {}}
        self.damaged: dict[str, Place] = {}
        self.disagreements: set[str] = set()
        self.unchecked = 0

    def add(self, record: Record, place: Place) -> None:
        """A record that is what was written."""
        key, status = record[0], record[2]
        records, places = self.records[status], self.places[status]
        if key in records:
            if status == "ok" and not _agree(records[key], record):
                self.disagreements.add(key)
            if (place < places[key]) != (status == "ok"):
                return
        records[key], places[key] = record, place

    def settle_damaged(self) -> dict[str, str]:
        """Keys whose last record is damaged and that have no success; an older failure of theirs does not stand."""
        out = {}
        for key, place in self.damaged.items():
            if key in self.records["ok"] or self.places["failed"].get(key, place) > place:
                continue
            self.records["failed"].pop(key, None)
            out[key] = place[1]
        return out


def _add_records(found: _Found, name: str, connection: sqlite3.Connection) -> None:
    begun = dict(connection.execute("SELECT id, committed FROM batches"))
    is_checked = _CHECKSUM in {column[1] for column in connection.execute("PRAGMA table_info(results)")}
    columns = f"{_COLUMNS}, {_CHECKSUM if is_checked else 'NULL'}"
    for row in connection.execute(f"SELECT {columns} FROM results"):  # noqa: S608
        record, checksum = row[:-1], row[-1]
        committed = begun.get(record[1])
        place = (committed or 0.0, name, record[1])
        if not is_checked:
            found.unchecked += 1
            _outcome(record)  # raises where it is none
            found.add(record, place)
        elif committed is not None and is_whole(record, checksum):
            found.add(record, place)
        else:
            key = str(record[0])
            found.damaged[key] = max(place, found.damaged.get(key, place))


def is_network(folder: Path) -> bool:
    """Whether a folder is on a network filesystem, where SQLite's write-ahead log is not safe."""
    place = folder.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if place.is_relative_to(m.mountpoint)]
    deepest = max(mounts, key=lambda m: len(m.mountpoint), default=None)
    return deepest is not None and deepest.fstype.lower().startswith(_NETWORK)


def _reading(path: Path) -> sqlite3.Connection:
    open_file(path).close()  # a pipe in its place would be waited for
    # Opened for writing on purpose: after a kill, SQLite must first bring the log into the file.
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS)
    connection.execute("SELECT COUNT(*) FROM sqlite_master")
    return connection


@contextmanager
def _unreadable_named(path: Path) -> Iterator[None]:
    """Whatever a journal holds that none of ours would have written is said of the file."""
    try:
        yield
    except (TruebatchError, sqlite3.Error, TypeError, ValueError, RecursionError) as error:
        seen = error.seen if isinstance(error, TruebatchError) else str(error)
        raise RunError(
            f"the journal {path.name} cannot be read",
            seen=f"{path}: {seen}",
            do="bring it back from a copy, or move it away: its samples are then scored again",
        ) from error


def _outcome(record: Record) -> Outcome:
    key, _, status, score, output, tokens, stage, kind, message, attempts = record
    return Outcome(
        key=key, status=status, score=score, output=json.loads(output), tokens=tokens,  # type: ignore[arg-type]
        stage=stage, kind=kind, message=message, attempts=attempts,  # type: ignore[arg-type]
    )  # fmt: skip


def _suspects(connection: sqlite3.Connection) -> list[CrashedBatch]:
    begun = connection.execute("SELECT number, attempt, keys FROM batches WHERE committed IS NULL").fetchall()
    if not begun or _is_alive(connection):
        return []
    return [CrashedBatch(number, attempt, tuple(json.loads(keys))) for number, attempt, keys in begun]


def _has_tables(connection: sqlite3.Connection) -> bool:
    """A worker killed while its file was made leaves one without tables."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return {"worker", "batches", "results"} <= names


def _is_alive(connection: sqlite3.Connection) -> bool:
    """Whether the worker still runs; one on another host is taken to be alive."""
    found = connection.execute("SELECT host, pid, born FROM worker").fetchone()
    if found is None:
        return False
    host, pid, born = found
    if host != socket.gethostname():
        return True
    try:
        return bool(math.isclose(psutil.Process(pid).create_time(), born, abs_tol=1.0))
    except psutil.NoSuchProcess:
        return False


def _agree(one: Record, other: Record) -> bool:
    return one[3] == other[3] and (one[4] == other[4] or json.loads(one[4]) == json.loads(other[4]))


def _row(batch: int, outcome: Outcome) -> tuple[Any, ...]:
    score = outcome.score if outcome.score is None else float(outcome.score) + 0.0  # a database has no minus zero
    record = (
        outcome.key, batch, outcome.status, score, _output(outcome.output), outcome.tokens,
        outcome.stage, outcome.kind, outcome.message, outcome.attempts,
    )  # fmt: skip
    return *record, record_checksum(record)


def _output(output: Mapping[str, Any]) -> str:
    """As `to_json` writes it; for names and texts only an encoder is not made for each."""
    if _TEXTS.issuperset(map(type, output.values())):
        return "{" + ", ".join([f"{_quoted(name)}: {_quoted(one)}" for name, one in output.items()]) + "}"
    return to_json(dict(output))


def _cannot_write(path: Path, error: sqlite3.Error) -> RunError:
    return RunError(
        "the journal cannot be written; what was committed stays",
        seen=f"{path}: {error}",
        do="free space or repair the disk, then run the same command again to resume",
    )
