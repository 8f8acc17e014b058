"""Read a field's value from a sample, whatever type it has, and reject what contradicts the declaration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truebatch.batch.fields import Field
from truebatch.errors import BatchError

Value = NDArray[Any] | Tensor

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Torch can store these but not compute with them, so they become int64."""
_LARGEST_BYTES = 8
_WIDER = {np.dtype(np.uint16): np.int64, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


def read_value(value: Any, field: Field, sample_id: int) -> Value:
    """The value as an array or tensor, its first axis the ragged one."""
    out = _as_array(value, field, sample_id)
    if field.kind != "once" and out.ndim == 0:
        raise BatchError(
            f"field {field.name!r} of sample {sample_id} has no length",
            seen=f"a single value {value!r:.60}, declared kind={field.kind!r}",
            do="return a list or an array, or declare kind='once'",
        )
    return out


def read_nested(value: Any, field: Field, sample_id: int) -> list[Value]:
    """The inner values of a nested field. An empty set has no meaning for attention and is rejected."""
    if not isinstance(value, Sequence | np.ndarray | Tensor) or isinstance(value, str):
        raise BatchError(
            f"field {field.name!r} of sample {sample_id} is not nested",
            seen=f"{type(value).__name__}, declared kind='nested'",
            do="return a list of lists (or of arrays), one per set",
        )
    out = [read_value(inner, field, sample_id) for inner in value]
    empty = next((at for at, inner in enumerate(out) if len(inner) == 0), None)
    if empty is not None:
        raise BatchError(
            f"field {field.name!r} of sample {sample_id} has an empty set",
            seen=f"set {empty} of {len(out)} has no entries",
            do="drop empty sets when the data is loaded; nothing could be computed from them",
        )
    return out


def tokens_of(values: list[Value], field: Field, owners: Sequence[int] | None = None) -> Tensor:
    """[n, ...]: all values concatenated, in one dtype, with equal trailing shapes.

    `owners` are the ids of the samples they belong to, for messages; by default their positions.
    """
    owners = range(len(values)) if owners is None else owners
    # An empty list says nothing about dimensions or dtype.
    telling = [(v, owner) for v, owner in zip(values, owners, strict=True) if v.ndim > 1 or len(v)]
    if not telling:
        return _nothing(values, field)
    _check_alike([(v.shape[1:], v, owner) for v, owner in telling], field)
    return _finish(_joined(values, stack=False), field)


def shift_tokens(tokens: Tensor, lengths: Sequence[int], field: Field) -> Tensor:
    """[n, ...]: entry t of a sample becomes its entry t + shift; entries past its end get the pad value.

    In the final dtype: the pad value must fit that, not the dtype the data is stored in.
    """
    ends = np.repeat(np.cumsum(lengths), lengths)
    over = np.flatnonzero(np.arange(len(tokens)) + field.shift >= ends)
    moved = torch.cat([tokens[field.shift :], tokens[: field.shift]])
    return moved.index_fill_(0, torch.from_numpy(over), field.pad)


def stack_values(values: list[Value], field: Field, owners: Sequence[int] | None = None) -> Tensor:
    """[N, ...]: one entry per sample; `owners` as in `tokens_of`."""
    owners = range(len(values)) if owners is None else owners
    if not values:
        return torch.zeros(0, dtype=_dtype(field) or torch.int64)
    _check_alike([(v.shape, v, owner) for v, owner in zip(values, owners, strict=True)], field)
    return _finish(_joined(values, stack=True), field)


def _nothing(values: list[Value], field: Field) -> Tensor:
    if field.dtype != "keep":
        return torch.zeros(0, dtype=_dtype(field))
    dtype = _joined(values[:1], stack=False).dtype if values else torch.int64
    return torch.zeros(0, dtype=dtype if _fits(field.pad, dtype) else torch.float32)


def _as_array(value: Any, field: Field, sample_id: int) -> Value:
    if isinstance(value, Tensor):
        return value.detach().to(torch.int64) if value.dtype in _UNSIGNED else value.detach()
    try:
        out = np.asarray(value)
    except ValueError as error:
        raise _unreadable(field, sample_id, str(error)) from error
    if out.dtype.kind not in "biuf" or out.dtype.itemsize > _LARGEST_BYTES or _overflows(out):
        raise _unreadable(field, sample_id, f"{value!r:.60} ({out.dtype})")
    if not out.dtype.isnative:
        out = out.astype(
            out.dtype.newbyteorder("=")
        )  # files written on other machines; torch reads native byte order only
    if isinstance(value, list | tuple | float) and out.dtype == np.float64:
        out = out.astype(np.float32)  # Python's own numbers, as torch.tensor reads them
    if isinstance(value, list | tuple) and not len(value):
        out = out.astype(np.int64)  # the default; a declared dtype still applies
    return out.astype(_WIDER[out.dtype]) if out.dtype in _WIDER else out


def _overflows(value: NDArray[Any]) -> bool:
    return value.dtype == np.uint64 and bool(value.size) and int(value.max()) > np.iinfo(np.int64).max


def _unreadable(field: Field, sample_id: int, seen: str) -> BatchError:
    return BatchError(
        f"field {field.name!r} of sample {sample_id} is not an array of numbers",
        seen=seen,
        do="return equally long inner lists of numbers, or declare kind='nested' for two levels of variable length",
    )


def _check_alike(telling: list[tuple[Any, Value, int]], field: Field) -> None:
    """Reject values of different shapes or, if no dtype is declared, of different dtypes; (shape, value, sample)."""
    if len(telling) == 1:
        return
    shape, _, first = telling[0]
    for other, _, owner in telling:
        if tuple(other) != tuple(shape):
            raise BatchError(
                f"field {field.name!r} has different shapes in one micro-batch",
                seen=f"{tuple(shape)} in sample {first} and {tuple(other)} in sample {owner}"
                + (" after the first axis" if field.kind != "once" else ""),
                do="make these dimensions equal in every sample; only the first may vary",
            )
    kinds: dict[str, int] = {}
    for _, value, owner in telling:
        if value.shape[:1] != (0,):
            kinds.setdefault(str(value.dtype).removeprefix("torch."), owner)
    if field.dtype == "keep" and len(kinds) > 1:
        raise BatchError(
            f"field {field.name!r} has different dtypes in one micro-batch",
            seen=" and ".join(f"{kind} in sample {owner}" for kind, owner in sorted(kinds.items())),
            do="declare its dtype, for example Field(dtype='float32'): the result for a sample must not depend on others",
        )


def _joined(values: list[Value], *, stack: bool) -> Tensor:
    real = [v for v in values if stack or len(v)] or [max(values, key=lambda v: v.ndim)]
    arrays = [v for v in real if isinstance(v, np.ndarray)]
    if len(arrays) == len(real):
        return torch.from_numpy(np.stack(arrays) if stack else np.concatenate(arrays))
    tensors = [v if isinstance(v, Tensor) else torch.from_numpy(v.copy()) for v in real]
    return torch.stack(tensors) if stack else torch.cat(tensors)


def _finish(tokens: Tensor, field: Field) -> Tensor:
    out = tokens.to(_dtype(field) or tokens.dtype)
    if field.kind in ("along", "nested") and not _fits(field.pad, out.dtype):
        raise BatchError(
            f"the pad value of field {field.name!r} does not fit its dtype",
            seen=f"pad={field.pad}, dtype {out.dtype}",
            do="choose a pad value the dtype can hold, or declare another dtype",
        )
    return out


def _fits(pad: float, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point:
        return not math.isfinite(pad) or abs(pad) <= torch.finfo(dtype).max
    if dtype == torch.bool:
        return pad in (0, 1)
    return math.isfinite(pad) and pad == int(pad) and torch.iinfo(dtype).min <= pad <= torch.iinfo(dtype).max


def _dtype(field: Field) -> torch.dtype | None:
    return None if field.dtype == "keep" else getattr(torch, field.dtype)
