"""Plan files: arrays in a safetensors container, written atomically, opened by memory map.

8 bytes: length of the header -> JSON header (dtype, shape, offset of each array; settings) -> the arrays
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import DataError, PlanError
from truebatch.io.atomic_files import atomic_write
from truebatch.io.text_encoding import open_file
from truebatch.planning.assign_ranks import StepLayout
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan
from truebatch.planning.sample_table import Samples

FORMAT = "truebatch plan"
VERSION = 1
_MOST_HEADER = 1 << 24
_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_REQUIRED = ("order", "micro_starts", "step_starts", "lengths", "cut_ids", "cut_from", "dropped_ids")

Arrays = dict[str, NDArray[Any]]


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to one file atomically: a reader sees the old file or the whole new one.

    >>> from truebatch import PlanConfig, build_plan, save_plan
    >>> save_plan(build_plan([3, 1, 2], PlanConfig(cells=8)), "epoch-0.plan")
    """
    arrays = _arrays_of(plan)
    about = {
        "format": FORMAT, "version": VERSION, "config": plan.config.to_dict(), "epoch": plan.epoch, "ranks": plan.ranks,
        "fingerprint": plan.fingerprint, "checks": {name: zlib.crc32(array.data) for name, array in arrays.items()},
    }  # fmt: skip
    metadata = json.dumps(about | {"check": _check_of(about)}, sort_keys=True)
    header: dict[str, Any] = {"__metadata__": {"truebatch": metadata}}
    place = 0
    for name, array in arrays.items():
        kind = next(kind for kind, dtype in _DTYPES.items() if dtype == array.dtype)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that every array is aligned
    _write_whole(
        Path(path),
        [len(text).to_bytes(8, "little"), text, *(a.data.cast("B") for a in arrays.values() if a.size)],
    )


def load_plan(path: str | os.PathLike[str], *, check: bool = True) -> Plan:
    """Open a plan; its arrays stay on disk until a step needs them.

    `check` compares every array with its checksum, which reads the file once; the structure of the file is always
    checked.

    >>> from truebatch import PlanConfig, build_plan, load_plan, save_plan
    >>> file = "epoch-0.plan"
    >>> save_plan(build_plan([3, 1, 2], PlanConfig(cells=8)), file)
    >>> load_plan(file).num_samples
    3
    """
    file = Path(path)
    arrays, about = _read(file)
    if check:
        _check_sums(file, arrays, about)
    _check_starts(file, arrays)
    samples = Samples(
        arrays["lengths"],
        {name.removeprefix("cost."): a for name, a in arrays.items() if name.startswith("cost.")},
        {name.removeprefix("count."): a for name, a in arrays.items() if name.startswith("count.")},
        arrays["cut_ids"],
        arrays["cut_from"],
        arrays["dropped_ids"],
    )
    cut = StepLayout(arrays["order"], arrays["micro_starts"], arrays["step_starts"], arrays.get("row_starts"))
    plan = Plan(samples=samples, cut=cut, config=about["config"], epoch=about["epoch"], ranks=about["ranks"])
    plan.__dict__["fingerprint"] = about["fingerprint"]  # store the cached value; computing it would read every length
    return plan


def _arrays_of(plan: Plan) -> Arrays:
    cut, samples = plan.cut, plan.samples
    arrays: dict[str, Any] = {
        "micro_starts": cut.micro_starts, "step_starts": cut.step_starts, "cut_ids": samples.cut_ids,
        "cut_from": samples.cut_from, "dropped_ids": samples.dropped_ids,
    }  # fmt: skip
    if cut.row_starts is not None:
        arrays["row_starts"] = cut.row_starts
    arrays |= {f"cost.{name}": column for name, column in samples.costs.items()}
    arrays |= {f"count.{name}": column for name, column in samples.counts.items()}
    wide = {name: np.ascontiguousarray(array, dtype="<i8") for name, array in arrays.items()}
    order = np.ascontiguousarray(cut.order, dtype="<i4" if cut.order.dtype.itemsize == 4 else "<i8")
    # Eight-byte arrays first, so that every array is aligned to its item size.
    return wide | {"order": order, "lengths": np.ascontiguousarray(samples.lengths, dtype="<i4")}


def _check_of(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _write_whole(path: Path, parts: list[Any]) -> None:
    try:
        with atomic_write(path) as file:
            for part in parts:
                file.write(part)
    except OSError as error:
        raise DataError(
            "the plan could not be written", seen=f"{path}: {error}", do="choose an existing folder with enough space"
        ) from error


def _read(file: Path) -> tuple[Arrays, dict[str, Any]]:
    try:
        with open_file(file) as handle:
            size = os.fstat(handle.fileno()).st_size
            num = int.from_bytes(handle.read(8), "little")
            if size < 8 or num > min(_MOST_HEADER, size - 8):
                raise _damaged(file, f"{size:,} bytes, a header of {num:,}")
            text = handle.read(num)
    except OSError as error:
        raise DataError(
            "the plan cannot be opened", seen=f"{file}: {error}", do="check the path, or plan again"
        ) from error
    header = _parse(file, text)
    about = _parse_about(file, header.pop("__metadata__", None))
    arrays = {name: _map(file, name, entry, 8 + num, size) for name, entry in header.items()}
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        raise _damaged(file, f"no arrays {missing}")
    return arrays, about


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"a header that is not JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise _damaged(file, "a header that is not a table")
    return value


def _parse_about(file: Path, metadata: object) -> dict[str, Any]:
    text = metadata.get("truebatch") if isinstance(metadata, Mapping) else None
    if not isinstance(text, str):
        raise DataError(
            "this file is not a plan", seen=f"{file}: no truebatch metadata", do="give a file from save_plan"
        )
    about = _parse(file, text.encode("utf-8", "surrogatepass"))
    version = about.get("version")
    if about.get("format") != FORMAT or not isinstance(version, int):
        raise DataError(
            "this file is not a plan", seen=f"{file}: format {about.get('format')!r}", do="give a file from save_plan"
        )
    if version > VERSION:
        raise DataError(
            "this plan was written by a newer version",
            seen=f"{file}: version {version}, this one reads up to {VERSION}",
            do="update truebatch, or plan again",
        )
    if about.pop("check", None) != _check_of(about):
        raise _damaged(file, "settings that do not match their checksum")
    try:
        about["config"] = PlanConfig(**about["config"])
    except (TypeError, KeyError, PlanError, AttributeError) as error:
        raise _damaged(file, f"settings that are not valid ({error})") from error
    kinds = {"epoch": int, "ranks": int, "fingerprint": str, "checks": dict}
    wrong = [name for name, kind in kinds.items() if type(about.get(name)) is not kind]
    if wrong or about["epoch"] < 0 or about["ranks"] < 1:
        raise _damaged(file, f"metadata that is not valid ({wrong or 'epoch or ranks'})")
    return about


def _map(file: Path, name: str, entry: object, base: int, size: int) -> NDArray[Any]:
    """Read one array, after checking that it is inside the file."""
    fields = entry if isinstance(entry, Mapping) else {}
    dtype = _DTYPES.get(str(fields.get("dtype")))
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else []
    if dtype is None or len(numbers) != 3 or not all(type(v) is int and v >= 0 for v in numbers):
        raise _damaged(file, f"array {name!r} described as {str(entry)[:80]}")
    num, first, last = numbers
    if last - first != num * dtype.itemsize or base + last > size:
        raise _damaged(file, f"array {name!r} ends at byte {base + last:,} of {size:,}")
    if num == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=base + first, shape=(num,))


def _check_sums(file: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    for name, array in arrays.items():
        if zlib.crc32(np.ascontiguousarray(array).data) != about["checks"].get(name):
            raise _damaged(file, f"array {name!r} does not match its checksum")


def _check_starts(file: Path, arrays: Arrays) -> None:
    """Check that the arrays are consistent: steps -> micro-batches -> (rows ->) samples."""
    levels = ["step_starts", "micro_starts", *(["row_starts"] if "row_starts" in arrays else [])]
    ends = [len(arrays[name]) - 1 for name in levels[1:]] + [len(arrays["order"])]
    for name, end in zip(levels, ends, strict=True):
        starts = np.asarray(arrays[name])
        if len(starts) < 2 or starts[0] != 0 or starts[-1] != end or bool((starts[1:] < starts[:-1]).any()):
            raise _damaged(file, f"array {name!r} does not run from 0 to {end:,}")


def _damaged(file: Path, seen: str) -> DataError:
    return DataError("this plan file is damaged or truncated", seen=f"{file}: {seen}", do="delete it and plan again")
