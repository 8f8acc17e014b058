"""Finished rows of a census, kept line by line: one that was interrupted goes on, and stale rows do not count."""

from __future__ import annotations

import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import truebatch

CODE = (
    "attention/*.py",
    "batch/*.py",
    "hf/**/*.py",
    "planning/rows.py",
    "testing/tiny_hf/*.py",
    "verification/**/*.py",
)
"""Code whose change makes old rows worthless."""

UNFINISHED = ("killed", "crashed", "failed")
"""Rows that are tried again when the census goes on."""

Row = dict[str, Any]


def journal_key(device: str, dtype: str, *, quick: bool = False) -> dict[str, str]:
    """What a row depends on beside its architecture. `quick`: only the layout that is used was examined."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        **versions,
        "truebatch": truebatch.__version__,
        "code": _code(),
        "device": device,
        "dtype": dtype,
        **({"layouts": "the one that is used"} if quick else {}),
    }


def _code() -> str:
    """A fingerprint of the code a row depends on."""
    root = Path(truebatch.__file__).parent
    files = sorted(file for pattern in CODE for file in root.glob(pattern))
    total = hashlib.sha256()
    for file in files:
        total.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


def read_journal(path: Path, key: dict[str, str]) -> dict[tuple[str, str], Row]:
    """The finished rows made under the same key; a line cut off by a crash and rows that were killed do not count."""
    if not path.exists():
        return {}
    found: dict[tuple[str, str], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process died while writing it: the row is made again
        if entry["key"] == key and entry["row"]["verdict"] not in UNFINISHED:
            found[entry["row"]["head"], entry["row"]["model_type"]] = entry["row"]
    return found


def append_row(path: Path, key: dict[str, str], row: Row) -> None:
    """Keep one finished row. A line that a crash cut off before is closed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() and _last_byte(path) != b"\n":
            file.write(b"\n")
        file.write(json.dumps({"key": key, "row": row}).encode() + b"\n")


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()
