"""The input of a run in its order: the place, the name and the key of every sample, kept beside the journal.

With it an export is a function of the run folder alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truebatch.errors import DataError, RunError
from truebatch.scoring.backend import Asked
from truebatch.scoring.keys import canonical, sample_key
from truebatch.scoring.reading import Broken, read_asked
from truebatch.scoring.records import Outcome, failed
from truebatch.textfiles import read_lines
from truebatch.training.durable import damage_named, write_text

INPUT = "input.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One sample of the input."""

    index: int
    id: str
    key: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    asked: Asked | None = None
    """None where it could not be read, and where the list was read back."""
    failure: Outcome | None = None
    """Why it could not be read."""


def list_samples(source: Path | str | Iterable[Any]) -> list[Listed]:
    """The samples of a file or of Python values with their keys. Images are read for their hash, not decoded."""
    return list(iter_samples(source))


def iter_samples(source: Path | str | Iterable[Any]) -> Iterator[Listed]:
    """The same, one by one: a source may have no end."""
    return (_listed(index, one) for index, one in enumerate(read_asked(source)))


def by_key(listed: Iterable[Listed]) -> dict[str, list[Listed]]:
    """Samples by their keys: those of equal content stand together."""
    found: dict[str, list[Listed]] = {}
    for one in listed:
        found.setdefault(one.key, []).append(one)
    return found


def save_list(run: Path, listed: Sequence[Listed]) -> None:
    """Keep the order of the input in the run folder; the same list is not written again."""
    lines = (canonical({"index": x.index, "id": x.id, "key": x.key, "meta": dict(x.meta)}) for x in listed)
    text = "".join(f"{line}\n" for line in lines)
    path = run / INPUT
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def load_list(run: Path) -> list[Listed]:
    """The input of a run as it was last given."""
    path = run / INPUT
    if not path.is_file():
        raise RunError(f"{run} has no list of samples", seen=f"no {INPUT} in it", do="give the folder of a scoring run")
    return [_back(path, number, line) for number, line in read_lines(path)]


def _back(path: Path, number: int, line: str) -> Listed:
    again = "give the command of `truebatch score` again: it writes the list anew"
    with damage_named(Path(f"{path}:{number}"), do=again):
        return Listed(**json.loads(line))


def _listed(index: int, one: Asked | Broken) -> Listed:
    if isinstance(one, Broken):
        key = sample_key({"broken": one.raw})
        return Listed(
            index=index, id=one.id, key=key, failure=failed(key, stage="read", kind=one.kind, message=one.message)
        )
    try:
        key = sample_key(one.content(), one.images)
    except DataError as error:
        kind, stage = ("unreadable_image", "decode") if one.images else ("wrong_type", "read")
        key = sample_key({"unreadable": repr((one.content(), [str(image)[:200] for image in one.images]))})
        failure = failed(key, stage=stage, kind=kind, message=f"{error.wrong}: {error.seen}")  # type: ignore[arg-type]
        return Listed(index=index, id=one.id, key=key, meta=one.meta, failure=failure)
    return Listed(index=index, id=one.id, key=key, meta=one.meta, asked=one)
