"""The input of a run in its order: the place, the name and the key of every sample, kept beside the journal.

With it an export is a function of the run folder alone. Its first line has a checksum of the others: a name that was
moved to another score is seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truebatch.errors import DataError, RunError
from truebatch.io.atomic_files import corrupt_file_errors, write_text
from truebatch.io.text_encoding import read_lines
from truebatch.scoring.backends.interface import ScoreRequest
from truebatch.scoring.inputs.read_samples import Broken, read_requests
from truebatch.scoring.store.content_key import canonical, quoted, sample_key
from truebatch.scoring.store.outcome import Outcome, failed

INPUT = "input.jsonl"
_CHECKSUM = "checksum"
_AGAIN = "give the command of `truebatch score` again: it writes the list anew"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSample:
    """One sample of the input."""

    index: int
    id: str
    key: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    asked: ScoreRequest | None = None
    """None where it could not be read, and where the list was read back."""
    failure: Outcome | None = None
    """Why it could not be read."""


def list_samples(source: Path | str | Iterable[Any]) -> list[InputSample]:
    """The samples of a file or of Python values with their keys. Images are read for their hash, not decoded."""
    return list(iter_samples(source))


def iter_samples(source: Path | str | Iterable[Any]) -> Iterator[InputSample]:
    """The same, one by one: a source may have no end."""
    return (_listed(index, one) for index, one in enumerate(read_requests(source)))


def by_key(listed: Iterable[InputSample]) -> dict[str, list[InputSample]]:
    """Samples by their keys: those of equal content stand together."""
    found: dict[str, list[InputSample]] = {}
    for one in listed:
        found.setdefault(one.key, []).append(one)
    return found


def save_list(run: Path, listed: Sequence[InputSample]) -> None:
    """Keep the order of the input in the run folder; the same list is not written again."""
    body = "".join([_line(one) for one in listed])
    text = f"{canonical({_CHECKSUM: _checksum(body)})}\n{body}"
    path = run / INPUT
    if path.is_file() and path.read_bytes() == text.encode():
        return
    write_text(path, text)


def _line(one: InputSample) -> str:
    """As `canonical` writes the four of them."""
    meta = canonical(dict(one.meta)) if one.meta else "{}"
    return f'{{"id":{quoted(one.id)},"index":{one.index},"key":{quoted(one.key)},"meta":{meta}}}\n'


def load_list(run: Path) -> list[InputSample]:
    """The input of a run as it was last given."""
    path = run / INPUT
    if not path.is_file():
        raise RunError(f"{run} has no list of samples", seen=f"no {INPUT} in it", do="give the folder of a scoring run")
    lines = [line for _, line in read_lines(path)]
    told = _told_checksum(lines[0]) if lines else None
    if told is None:  # an earlier version wrote none
        return _all_back(path, lines, first=1)
    del lines[0]
    if told != _checksum("".join(lines)):
        raise RunError(
            f"{path} is not what was written: names and scores may no longer belong together",
            seen="its checksum does not belong to its lines",
            do=_AGAIN,
        )
    try:
        return [InputSample(**one) for one in json.loads(f"[{','.join(lines)}]")]
    except (TypeError, ValueError, RecursionError):
        return _all_back(path, lines, first=2)


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _told_checksum(line: str) -> object:
    """The checksum that the first line tells of the others; None where it is a sample."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value[_CHECKSUM] if isinstance(value, dict) and value.keys() == {_CHECKSUM} else None


def _all_back(path: Path, lines: Sequence[str], *, first: int) -> list[InputSample]:
    out: list[InputSample] = []
    try:
        for line in lines:
            out.append(InputSample(**json.loads(line)))
    except (TypeError, ValueError, RecursionError):
        number = len(out) + first
        with corrupt_file_errors(Path(f"{path}:{number}"), do=_AGAIN):
            raise
    return out


def _listed(index: int, one: ScoreRequest | Broken) -> InputSample:
    if isinstance(one, Broken):
        key = sample_key({"broken": one.raw})
        return InputSample(
            index=index, id=one.id, key=key, failure=failed(key, stage="read", kind=one.kind, message=one.message)
        )
    try:
        key = sample_key(one.content(), one.images)
    except DataError as error:
        kind, stage = ("unreadable_image", "decode") if one.images else ("wrong_type", "read")
        key = sample_key({"unreadable": repr((one.content(), [str(image)[:200] for image in one.images]))})
        failure = failed(key, stage=stage, kind=kind, message=f"{error.wrong}: {error.seen}")  # type: ignore[arg-type]
        return InputSample(index=index, id=one.id, key=key, meta=one.meta, failure=failure)
    return InputSample(index=index, id=one.id, key=key, meta=one.meta, asked=one)
