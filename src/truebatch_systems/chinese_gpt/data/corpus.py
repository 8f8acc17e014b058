"""Corpora of users: JSON arrays of strings, one file or many, every text with the place it came from.

path -> files in natural order -> JSON -> strings; nothing is skipped: what cannot be read stops with file and line
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from truebatch.errors import DataError
from truebatch.io.text_encoding import nearest, read_text

MAX_BYTES = 128 * 2**20
STAGES = ("pretraining", "chat")
"""Folders of a corpus in two stages; both are read."""
DIALOGUE = "用户：...助手：..."
"""How a dialogue is written, for messages."""


@dataclass(frozen=True, slots=True)
class Text:
    """One sample of a corpus as it was written."""

    text: str
    file: str
    number: int
    """Its place in the file, from 1."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.file}, entry {self.number}"


def read_corpus(path: Path) -> list[Text]:
    """All strings of a file or folder, in order, empty ones too."""
    texts = [text for file in corpus_files(path) for text in _read_file(file)]
    if not texts:
        raise DataError(
            f"{path} holds no samples",
            seen=f"{len(corpus_files(path))} files, each an empty array",
            do="write each sample as a string of a JSON array",
        )
    return texts


def corpus_files(path: Path) -> list[Path]:
    """The files of a corpus: numbers in names count as numbers, and names with numbers come first.

    A folder gives its .json files, or those of its folders pretraining/ and chat/. A file foo.json brings foo_extra.json.
    """
    if not path.is_dir():
        extra = path.with_name(f"{path.stem}_extra{path.suffix}")
        return [path, extra] if extra.is_file() else [path]
    stages = [path / name for name in STAGES if (path / name).is_dir()]
    files = [file for folder in stages or [path] for file in _json_files(folder)]
    if not files:
        names = sorted(file.name for file in path.iterdir())
        raise DataError(
            f"the folder {path} holds no .json file",
            seen=f"{', '.join(names[:5]) or 'nothing'}",
            do="put JSON arrays of strings there, or into its folders pretraining/ and chat/",
        )
    return files


def _json_files(folder: Path) -> list[Path]:
    return sorted((f for f in folder.iterdir() if f.suffix == ".json" and f.is_file()), key=_natural)


def _natural(file: Path) -> tuple[bool, list[tuple[bool, int, str]], str]:
    parts = re.findall(r"\d+|\D+", file.stem)
    keys = [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
    return not any(part.isdigit() for part in parts), keys, file.name


def _read_file(file: Path) -> list[Text]:
    source = read_text(file, max_bytes=MAX_BYTES)
    if not source.strip():
        raise DataError(
            f"{file} is empty", seen=f"{len(source)} characters, no JSON", do='write ["first sample", "second sample"]'
        )
    try:
        values = json.loads(source)
    except json.JSONDecodeError as error:
        raise _broken(file, source, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} holds JSON that cannot be read", seen=str(error)[:200], do="remove the deep nesting or the number"
        ) from error
    if not isinstance(values, list):
        raise DataError(
            f"{file} is not an array of strings",
            seen=f"the file holds one {_kind(values)}",
            do='write ["first sample", "second sample"]; one JSON object per line is for `truebatch train hf`',
        )
    _check_strings(file, values)
    _check_characters(file, values)
    return [Text(value, str(file), number) for number, value in enumerate(values, start=1)]


def _check_strings(file: Path, values: Sequence[object]) -> None:
    wrong = [(number, value) for number, value in enumerate(values, start=1) if not isinstance(value, str)]
    if wrong:
        number, value = wrong[0]
        raise DataError(
            f"{file}, entry {number} is not a string",
            seen=f"a {_kind(value)}: {json.dumps(value, ensure_ascii=False)[:60]}"
            + (f", and {len(wrong) - 1} more entries" if len(wrong) > 1 else ""),
            do=f"write every sample as one string, a dialogue as {DIALOGUE}",
        )


def _check_characters(file: Path, values: Sequence[str]) -> None:
    for number, value in enumerate(values, start=1):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{file}, entry {number} holds half a character (a lone surrogate)",
                seen=f"{value[error.start]!r} at character {error.start}",
                do="write the text again: a character such as an emoji was cut in two",
            ) from error


def _broken(file: Path, source: str, error: json.JSONDecodeError) -> DataError:
    line = source.splitlines()[error.lineno - 1] if error.lineno <= len(source.splitlines()) else ""
    return DataError(
        f"{file}:{error.lineno} is not JSON: {error.msg}",
        seen=f"column {error.colno} of {line[:60]!r}",
        do="mend that line (a comma or quote is missing there or before it); no part of the file was read",
    )


def _kind(value: object) -> str:
    return {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}.get(
        type(value), "number"
    )


def refuse_unknown(name: str, known: Sequence[str]) -> DataError:
    """The error for a corpus that is neither a path nor a name."""
    return DataError(
        f"there is no corpus {name!r}{nearest(name, list(known))}",
        seen="neither a file, a folder nor the name of a corpus",
        do=f"give a .json file or a folder, or one of: {', '.join(known)}",
    )
