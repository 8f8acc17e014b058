"""Nested state (of models, optimisers, schedulers, random generators) as plain JSON beside a flat table of tensors.

nested value -> JSON with references + {name: tensor} -> the same nested value; never pickle

JSON has no tuples, no infinity and only text as keys: such values become `{"$": kind, "of": ...}`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truebatch.errors import CheckpointError
from truebatch.training.distributed.fsdp import LocalRows

MARK = "$"


@dataclass(frozen=True, slots=True)
class Packed:
    """A nested value taken apart."""

    values: Any
    tensors: dict[str, Tensor]
    shards: dict[str, LocalRows] = field(default_factory=dict)
    """Tensors of which each rank has some rows."""


def pack(value: Any, *, name: str = "value") -> Packed:
    """Take a nested value apart; `name` stands in messages.

    Dictionaries, lists, tuples, sets, text, numbers, bytes, tensors and arrays come back equal, with their dtypes; one
    tensor used in several places is stored once. Anything else is refused by its place.
    """
    packer = _Packer(name)
    return Packed(packer.pack(value, ()), packer.tensors, packer.shards)


def unpack(values: Any, tensors: Mapping[str, Any]) -> Any:
    """Put a nested value together again from what `pack` made; anything else raises `CheckpointError`."""
    try:
        return _unpack(values, tensors)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _unreadable(f"values of another shape ({error})") from error


def _unpack(values: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(values, list):
        return [_unpack(one, tensors) for one in values]
    if not isinstance(values, dict):
        return values
    if MARK not in values:
        return {key: _unpack(one, tensors) for key, one in values.items()}
    return _unmark(values[MARK], values.get("of"), tensors)


def _unmark(kind: Any, of: Any, tensors: Mapping[str, Any]) -> Any:
    if kind in ("tensor", "array"):
        if of not in tensors:
            raise _unreadable(f"no tensor {of!r} beside the values")
        return tensors[of] if kind == "tensor" else tensors[of].numpy()
    if kind == "float":
        return float(of)
    if kind == "bytes":
        return bytes.fromhex(of)
    inner = [_unpack(one, tensors) for one in of]
    if kind == "tuple":
        return tuple(inner)
    if kind == "set":
        return set(inner)
    if kind in ("dict", "counter"):
        pairs = dict(inner)
        return pairs if kind == "dict" else Counter(pairs)
    raise _unreadable(f"a value of kind {kind!r}")


def _unreadable(seen: str) -> CheckpointError:
    return CheckpointError(
        "the values of a checkpoint cannot be put together", seen=seen, do="read it with the version that wrote it"
    )


@dataclass(slots=True)
class _Packer:
    name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    shards: dict[str, LocalRows] = field(default_factory=dict)
    known: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def pack(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            return {MARK: "tensor", "of": self.keep(value, path)}
        if isinstance(value, LocalRows):
            return {MARK: "tensor", "of": self.keep_rows(value, path)}
        if isinstance(value, np.ndarray):
            return {MARK: "array", "of": self.keep(self.as_tensor(value, path), path)}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int) and type(value).__name__ in ("int", "bool"):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {MARK: "float", "of": repr(float(value))}
        if isinstance(value, bytes):
            return {MARK: "bytes", "of": value.hex()}
        return self.pack_many(value, path)

    def pack_many(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return self.pack_mapping(value, path)
        if isinstance(value, set | frozenset):
            value = sorted(value, key=repr)
            return {MARK: "set", "of": [self.pack(one, path) for one in value]}
        if isinstance(value, list | tuple):
            inner = [self.pack(one, (*path, str(i))) for i, one in enumerate(value)]
            return inner if isinstance(value, list) else {MARK: "tuple", "of": inner}
        raise self.refuse(path, f"a {type(value).__name__}: {str(value)[:60]!r}")

    def pack_mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        if all(isinstance(key, str) for key in value) and MARK not in value and not isinstance(value, Counter):
            return {key: self.pack(one, (*path, key)) for key, one in value.items()}
        pairs = [[self.pack(key, path), self.pack(one, (*path, str(key)))] for key, one in value.items()]
        return {MARK: "counter" if isinstance(value, Counter) else "dict", "of": pairs}

    def keep(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        self.check(tensor, path)
        # Its place in memory says whether two names are one tensor (tied weights).
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in self.known:
            return self.known[place]
        name = self.new_name(path)
        self.tensors[name] = tensor
        self.known[place] = name
        return name

    def keep_rows(self, value: LocalRows, path: tuple[str, ...]) -> str:
        self.check(value.rows, path)
        # Two names of one tensor are written twice: a rank without rows of it could not tell them apart.
        name = self.new_name(path)
        self.shards[name] = value
        return name

    def new_name(self, path: tuple[str, ...]) -> str:
        name = base = "/".join(path) or self.name
        number = 1
        while name in self.tensors or name in self.shards:
            number += 1
            name = f"{base}#{number}"
        return name

    def check(self, tensor: Tensor, path: tuple[str, ...]) -> None:
        if hasattr(tensor, "full_tensor"):
            raise self.refuse(path, f"a tensor spread over processes, of shape {tuple(tensor.shape)}", whole=True)
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise self.refuse(path, f"a tensor without plain values ({tensor.layout}, {tensor.device})")

    def as_tensor(self, array: np.ndarray[Any, Any], path: tuple[str, ...]) -> Tensor:
        try:
            return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())
        except TypeError as error:
            raise self.refuse(path, f"an array of {array.dtype}") from error

    def refuse(self, path: tuple[str, ...], seen: str, *, whole: bool = False) -> CheckpointError:
        return CheckpointError(
            f"{'.'.join((self.name, *path))} cannot be stored in a checkpoint",
            seen=seen,
            do="gather it to a whole tensor first" if whole else "store tensors, numbers, text, lists and dictionaries",
        )
