"""The DATA argument of a command: a data file, a .npy of lengths, or an object in the user's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from truebatch.errors import ConfigError, DataError
from truebatch.import_target import call_target, is_target, resolve_target
from truebatch.io.data_files import FORMATS
from truebatch.planning.lengths.measure import Measured, measure
from truebatch.planning.rows import Ints


def read_lengths(path: Path) -> Measured:
    """The lengths in a .npy file; nothing in it is ever executed."""
    if not path.is_file():
        raise DataError(f"there is no file {path}", seen=str(path), do="check the path")
    try:
        with path.open("rb") as file:
            lengths = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TokenError, MemoryError, RecursionError) as error:
        # A header with a wrong size, or an invalid one, fails in all of these ways.
        raise DataError(
            f"{path} is not a .npy file of numbers",
            seen=str(error)[:120],
            do="write it with numpy.save(path, lengths), lengths a 1-D array of whole numbers",
        ) from error
    if not isinstance(lengths, np.ndarray):
        raise DataError(f"{path} holds several arrays", seen=f"{lengths.files}", do="save one array with numpy.save")
    return measured_lengths(lengths, str(path))


def read_data(
    data: str, *, field: str | None, tokenizer: Path | None, costs: Mapping[str, str], cache: Path | None
) -> Measured:
    """Measure DATA: a data file, a .npy of lengths, or `package.module:name` / `file.py:name`."""
    if data.endswith(".npy"):
        _refuse_options(data, field, tokenizer, costs)
        return read_lengths(Path(data))
    if not is_target(data) or Path(data).is_file():
        _refuse_plain_name(data)
        return measure(data, field=field, tokenizer=tokenizer, costs=costs, cache=cache)
    found = resolve_target(data)
    found = call_target(data, found) if callable(found) else found
    if isinstance(found, Measured):
        _refuse_options(data, field, tokenizer, costs)
        return found
    if isinstance(found, np.ndarray):
        _refuse_options(data, field, tokenizer, costs)
        return measured_lengths(found, data)
    _refuse_other(data, found)
    return measure(found, field=field, tokenizer=tokenizer, costs=costs)


def measured_lengths(lengths: Any, name: str) -> Measured:
    """Lengths that are already numbers; float, NaN, wrong shape and so on raise `DataError`."""
    whole = lengths.dtype.kind in "iu" and lengths.ndim == 1
    if not whole or (lengths.dtype == np.uint64 and len(lengths) and lengths.max() >= 2**63):
        raise DataError(
            f"{name} must hold one integer per sample",
            seen=f"dtype {lengths.dtype}, shape {lengths.shape}",
            do="save lengths as a 1-D array of int64: numpy.save(path, lengths.astype('int64'))",
        )
    column: Ints = lengths.astype(np.int64)
    return Measured(lengths=column, found=f"lengths given in {name}")


def _refuse_options(data: str, field: str | None, tokenizer: Path | None, costs: Mapping[str, str]) -> None:
    given = [f"--field {field}"] if field else []
    given += [f"--tokenizer {tokenizer}"] if tokenizer else []
    given += [f"--cost {name}" for name in costs]
    if given:
        raise ConfigError(
            f"{data} gives lengths already, there is no field to read",
            seen=", ".join(given),
            do="omit that option, or name the data file itself",
        )


def _refuse_plain_name(data: str) -> None:
    path = Path(data)
    if "：" in data and not path.exists():
        resolve_target(data)  # says that it is the full-width colon
    if path.suffix == ".py" and path.is_file():
        raise ConfigError(
            f"{data} is a Python file: give the name in it",
            seen=repr(data),
            do=f"write {data}:NAME, where NAME is a sequence or a function that returns one",
        )
    if not path.exists() and not path.suffix:
        raise ConfigError(
            f"{data!r} is neither a file nor a target",
            seen=repr(data),
            do=f"name a file ({' '.join(FORMATS)} .npy), or package.module:name, or file.py:name",
        )


def _refuse_other(data: str, found: Any) -> None:
    if not isinstance(found, Sequence) and not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigError(
            f"{data} is not a dataset",
            seen=f"a {type(found).__name__}",
            do="name a sequence of samples or lengths, or a function without arguments that returns one",
        )
    if isinstance(found, str | Mapping):
        raise ConfigError(
            f"{data} is not a dataset", seen=f"a {type(found).__name__}", do="name a list of samples or of lengths"
        )
