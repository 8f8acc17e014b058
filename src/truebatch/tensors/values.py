"""Read the value of a field from a sample, whatever it came as, and refuse what contradicts the declaration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truebatch.errors import BatchError
from truebatch.tensors.field import Field

Value = NDArray[Any] | Tensor

_WIDER = {np.dtype(np.uint16): np.int64, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


def read_value(value: Any, field: Field, sample_id: int) -> Value:
    """The value as an array or tensor, shifted if the field asks for it, its first axis the ragged one."""
    out = _as_array(value, field, sample_id)
    if field.kind != "once" and out.ndim == 0:
        raise BatchError(
            f"field {field.name!r} of sample {sample_id} has no length",
            seen=f"a single value {value!r:.60}, declared kind={field.kind!r}",
            do="return a list or an array, or declare kind='once'",
        )
    return _shifted(out, field) if field.shift else out


def read_nested(value: Any, field: Field, sample_id: int) -> list[Value]:
    """The inner values of a nested field. An empty set has no meaning for attention and is refused."""
    if not isinstance(value, Sequence | np.ndarray | Tensor) or isinstance(value, str):
        raise BatchError(
            f"field {field.name!r} of sample {sample_id} is not nested",
            seen=f"{type(value).__name__}, declared kind='nested'",
            do="return a list of lists (or of arrays), one a set",
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


def tokens_of(values: list[Value], field: Field) -> Tensor:
    """[n, ...]: all values one after the other, in one dtype, with equal trailing shapes."""
    if not values:
        return torch.zeros(0, dtype=_dtype(field) or torch.int64)
    _check_alike([v.shape[1:] for v in values], values, field)
    return _finish(_joined(values, stack=False), field)


def stack_values(values: list[Value], field: Field) -> Tensor:
    """[N, ...]: one entry a sample."""
    if not values:
        return torch.zeros(0, dtype=_dtype(field) or torch.int64)
    _check_alike([v.shape for v in values], values, field)
    return _finish(_joined(values, stack=True), field)


def _as_array(value: Any, field: Field, sample_id: int) -> Value:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        out = np.asarray(value)
    except ValueError as error:
        raise _unreadable(field, sample_id, str(error)) from error
    if out.dtype.kind not in "biuf":
        raise _unreadable(field, sample_id, f"{value!r:.60} ({out.dtype})")
    if isinstance(value, list | tuple | float) and out.dtype == np.float64:
        out = out.astype(np.float32)  # Python's own numbers, as torch.tensor reads them
    if isinstance(value, list | tuple) and not len(value):
        out = out.astype(np.int64)  # nothing says otherwise; a declared dtype still applies
    return out.astype(_WIDER[out.dtype]) if out.dtype in _WIDER else out


def _unreadable(field: Field, sample_id: int, seen: str) -> BatchError:
    return BatchError(
        f"field {field.name!r} of sample {sample_id} is not an array of numbers",
        seen=seen,
        do="return equally long inner lists of numbers, or declare kind='nested' for two ragged levels",
    )


def _shifted(value: Value, field: Field) -> Value:
    rest = value[field.shift :]
    missing = len(value) - len(rest)
    if isinstance(rest, Tensor):
        return torch.cat([rest, rest.new_full((missing, *rest.shape[1:]), field.pad)])
    return np.concatenate([rest, np.full((missing, *rest.shape[1:]), field.pad, dtype=rest.dtype)])


def _check_alike(shapes: list[Any], values: list[Value], field: Field) -> None:
    different = next((s for s in shapes if tuple(s) != tuple(shapes[0])), None)
    if different is not None:
        raise BatchError(
            f"field {field.name!r} has different shapes in one micro-batch",
            seen=f"{tuple(shapes[0])} and {tuple(different)}"
            + (" after the ragged axis" if field.kind != "once" else ""),
            do="make these dimensions equal in every sample, or declare the ragged one as the first",
        )
    kinds = {str(v.dtype).removeprefix("torch.") for v in values if v.shape[:1] != (0,)}
    if field.dtype == "keep" and len(kinds) > 1:
        raise BatchError(
            f"field {field.name!r} has different dtypes in one micro-batch",
            seen=f"{sorted(kinds)}",
            do="declare its dtype, for example Field(dtype='float32'): what a sample becomes must not depend on others",
        )


def _joined(values: list[Value], *, stack: bool) -> Tensor:
    real = [v for v in values if stack or len(v)] or values[:1]
    arrays = [v for v in real if isinstance(v, np.ndarray)]
    if len(arrays) == len(real):
        return torch.from_numpy(np.stack(arrays) if stack else np.concatenate(arrays))
    tensors = [v if isinstance(v, Tensor) else torch.from_numpy(v.copy()) for v in real]
    return torch.stack(tensors) if stack else torch.cat(tensors)


def _finish(tokens: Tensor, field: Field) -> Tensor:
    out = tokens.to(_dtype(field) or tokens.dtype)
    if field.kind in ("along", "nested"):
        pad = torch.tensor(field.pad, dtype=torch.float64).to(out.dtype)
        if float(pad) != field.pad and field.pad == field.pad and not out.dtype.is_floating_point:
            raise BatchError(
                f"the pad value of field {field.name!r} does not fit its dtype",
                seen=f"pad={field.pad}, dtype {out.dtype}",
                do="choose a pad value the dtype can hold, or declare another dtype",
            )
    return out


def _dtype(field: Field) -> torch.dtype | None:
    return None if field.dtype == "keep" else getattr(torch, field.dtype)
