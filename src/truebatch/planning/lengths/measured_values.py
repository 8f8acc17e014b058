"""The result of measuring: one or more numbers per sample, in memory and on disk.

Files are written atomically and read only under the fingerprint they were written for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from truebatch.errors import DataError
from truebatch.io.array_files import read_arrays, write_arrays
from truebatch.planning.rows import Ints


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measured:
    """One or more numbers per sample; the sample id is the position in these arrays.

    >>> import numpy as np
    >>> from truebatch import Measured
    >>> Measured(lengths=np.array([3, 1, 2]), counts={"loss": np.array([2, 0, 1])}).unit
    'tokens'
    """

    lengths: Ints
    """[N] tokens (or characters, see `unit`) of every sample."""
    costs: Mapping[str, Ints] = field(default_factory=dict)
    """{name: [N]}: other costs of a sample, for example image patches; budgets can limit each."""
    counts: Mapping[str, Ints] = field(default_factory=dict)
    """{name: [N]}: what its loss terms are divided by, so that a step's counts are known without reading its
    samples."""
    ids: tuple[str, ...] | None = None
    """The samples' own names, for messages."""
    unit: str = "tokens"
    found: str = "given"
    """Description of which field was measured, and how."""
    fingerprint: str = ""
    """Changes when the data or the method of measuring does; derived from the numbers if not given."""

    def __post_init__(self) -> None:
        columns = {"lengths": self.lengths, **self.costs, **self.counts}
        for name, column in columns.items():
            kind = column.dtype if isinstance(column, np.ndarray) else f"none, a {type(column).__name__}"
            if kind != np.int64 or column.shape != (len(self.lengths),):
                raise DataError(
                    f"the column {name!r} must hold one int64 for each sample",
                    seen=f"shape {np.shape(column)}, dtype {kind}, {len(self.lengths)} samples",
                    do="give numpy arrays of dtype int64, all of the same length",
                )
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", _hash_columns(columns))


def save_measured(measured: Measured, file: Path) -> None:
    """Write the numbers to `file` atomically: readers see the old state or the new one."""
    arrays = {"lengths": measured.lengths}
    arrays |= {f"cost:{name}": column for name, column in measured.costs.items()}
    arrays |= {f"count:{name}": column for name, column in measured.counts.items()}
    about = {"fingerprint": measured.fingerprint, "unit": measured.unit, "found": measured.found, "ids": measured.ids}
    try:
        write_arrays(file, arrays, about)
    except OSError as error:
        raise DataError(
            "the measured lengths cannot be cached",
            seen=f"{file.parent}: {error}",
            do="choose another folder with --cache DIR (cache=... in Python), or turn the cache off with --no-cache",
        ) from error


def load_measured(file: Path, fingerprint: str) -> Measured | None:
    """The numbers saved under this fingerprint; None if there are none, or the file is damaged."""
    found = read_arrays(file)
    try:
        return None if found is None or found[1]["fingerprint"] != fingerprint else _build(*found)
    except (DataError, KeyError):
        return None  # Measuring again replaces it; nothing is lost but time.


def cache_folder() -> Path:
    """The cache folder of measured lengths and encoded samples: TRUEBATCH_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("TRUEBATCH_CACHE") or Path(base) / "truebatch")


def _hash_columns(columns: Mapping[str, Ints]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, column in columns.items():
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def _build(arrays: dict[str, Any], about: dict[str, Any]) -> Measured:
    def columns(prefix: str) -> dict[str, Ints]:
        return {name.removeprefix(prefix): column for name, column in arrays.items() if name.startswith(prefix)}

    ids = about["ids"]
    return Measured(
        lengths=arrays["lengths"],
        costs=columns("cost:"),
        counts=columns("count:"),
        ids=tuple(ids) if isinstance(ids, list) else None,
        unit=str(about["unit"]),
        found=str(about["found"]),
        fingerprint=str(about["fingerprint"]),
    )
