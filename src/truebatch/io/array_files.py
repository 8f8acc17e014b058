"""Arrays and their metadata in one file, written whole or not at all."""

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
    """Write both to `file` atomically: readers see the old state or the new one. Disk errors are raised."""
    words = np.frombuffer(json.dumps(dict(about)).encode(), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as draft:
        np.savez(draft, allow_pickle=False, **arrays, about=words)


def read_arrays(file: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """Read what `write_arrays` wrote; None if the file is missing or damaged, because it is a cache and can be
    rebuilt."""
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
        about = json.loads(arrays.pop("about").tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return (arrays, about) if isinstance(about, dict) else None
