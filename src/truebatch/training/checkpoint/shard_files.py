"""Tensors whose rows lie in the files of several ranks: each rank writes its own, and any number of ranks reads them.

model-1-of-2.safetensors   the rows of rank 0, under the names of the whole tensors
model-2-of-2.safetensors   the rows of rank 1
shards.json                for each tensor: dtype, shape, and how many rows each file has, in order

Nothing but JSON and safetensors is read, and all of these files stand in the manifest of their checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from truebatch.errors import CheckpointError
from truebatch.io.atomic_files import corrupt_file_errors, read_json
from truebatch.training.checkpoint.manifest import SHARDS, CheckpointManifest, untrusted
from truebatch.training.checkpoint.tensor_files import dtype_name, dtype_of
from truebatch.training.distributed.fsdp import LocalRows

_MOST_BYTES = 1 << 28
_MOST_CELLS = 1 << 56
RowTable = dict[str, dict[str, Any]]
"""Of one part of a checkpoint: what `shards.json` says of each tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """A tensor in several files, of which rows are read when they are asked for."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    files: tuple[Path, ...]
    rows: tuple[int, ...]
    """How many rows each file has."""

    def read(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the whole tensor, on the CPU."""
        parts, first = [], 0
        for file, number in zip(self.files, self.rows, strict=True):
            begin, end = max(start, first), min(stop, first + number)
            if begin < end:
                parts.append(self._read(file, begin - first, end - first, number))
            first += number
        return torch.cat(parts) if parts else torch.empty((0, *self.shape[1:]), dtype=self.dtype)

    def _read(self, file: Path, start: int, stop: int, number: int) -> Tensor:
        try:
            with safe_open(str(file), framework="pt") as opened:
                kept = opened.get_slice(self.name)
                if tuple(kept.get_shape()) != (number, *self.shape[1:]) or kept.get_dtype() != dtype_name(self.dtype):
                    raise _unreadable(file, f"{self.name!r} has another shape or dtype than {SHARDS} says")
                rows: Tensor = kept[start:stop]
        except SafetensorError as error:
            raise _unreadable(file, str(error)) from error
        return rows


def _unreadable(file: Path, seen: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name} is not a whole safetensors file", seen=f"{file}: {seen}", do="go back to an earlier one"
    )


def shard_file(part: str, at: int, number: int) -> str:
    """The file of rank `at` of `number` for a part of a checkpoint."""
    return f"{part}-{at + 1}-of-{number}.safetensors"


def row_table(shards: Mapping[str, LocalRows], rows: Sequence[Mapping[str, int]]) -> RowTable:
    """What `shards.json` says of these tensors, by how many rows each rank has."""
    return {
        name: {
            "dtype": dtype_name(one.rows.dtype, name),
            "shape": list(one.shape),
            "rows": [int(here[name]) for here in rows],
        }
        for name, one in shards.items()
    }


def read_row_tables(folder: Path, manifest: CheckpointManifest) -> dict[str, RowTable]:
    """What lies in shards in this checkpoint, by part; nothing in one that was written whole."""
    if SHARDS not in manifest.files:
        return {}
    with corrupt_file_errors(folder / SHARDS):
        tables: dict[str, RowTable] = dict(read_json(folder / SHARDS, max_bytes=_MOST_BYTES))
    return tables


def stored_tensors(folder: Path, part: str, table: RowTable, manifest: CheckpointManifest) -> dict[str, StoredRows]:
    """The tensors of a part that lie in shards, unread; what the table says is checked."""
    try:
        return {name: _stored(folder, part, name, about, manifest) for name, about in table.items()}
    except (TypeError, KeyError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise untrusted(folder, f"{SHARDS} has other fields ({error})") from error


def _stored(folder: Path, part: str, name: str, about: Mapping[str, Any], manifest: CheckpointManifest) -> StoredRows:
    shape, rows = torch.Size(about["shape"]), tuple(int(n) for n in about["rows"])
    files = [shard_file(part, at, len(rows)) for at in range(len(rows))]
    if any(file not in manifest.files for file in files):
        raise untrusted(folder, f"{SHARDS} names files that do not belong to it")
    if min(shape) < 0 or math.prod(max(n, 1) for n in shape) > _MOST_CELLS:
        raise untrusted(folder, f"{SHARDS} gives {name!r} the shape {list(shape)}, which no tensor has")
    if sum(rows) != shape[0] or min(rows) < 0:
        raise untrusted(folder, f"{SHARDS} gives {name!r} {sum(rows)} rows of {shape[0]}")
    return StoredRows(name, shape, dtype_of(about["dtype"]), tuple(folder / file for file in files), rows)
