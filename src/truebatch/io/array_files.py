"""Arrays and a few words about them in one file, which is there whole or not at all."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.io.atomic_files import atomic_write


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> None:
    """Write both to `file`; readers see the old state or the new one, never a part. Errors of the disk go through."""
    words = np.frombuffer(json.dumps(dict(about)).encode(), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as draft:
        np.savez(draft, allow_pickle=False, **arrays, about=words)


def read_arrays(file: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """What was written to `file`; None if nothing was, or it is damaged: it is a cache, and can be made again."""
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
        about = json.loads(arrays.pop("about").tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return (arrays, about) if isinstance(about, dict) else None
