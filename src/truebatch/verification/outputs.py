"""What a forward pass gave, taken apart: named tensors, and of each tensor the part that belongs to one sample."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from truebatch.batch.microbatch import FlatAxis, MicroBatch, RowAxis
from truebatch.errors import BatchError

PerSample = dict[str, list[Tensor]]
"""Output name -> one tensor a sample, in the order of the micro-batch."""


def named_tensors(value: Any, name: str = "output") -> dict[str, Tensor]:
    """Every tensor in a result, whatever it is wrapped in: tensors, tuples, mappings, dataclasses, model outputs."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        return _joined((f"{name}.{k}", v) for k, v in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _joined((f"{name}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _joined((f"{name}.{at}", v) for at, v in enumerate(value))
    return {}


def _joined(items: Any) -> dict[str, Tensor]:
    return {key: tensor for name, value in items for key, tensor in named_tensors(value, name).items()}


def split_output(value: Any, batch: MicroBatch, readings: Readings | None = None) -> PerSample:
    """A result of a micro-batch as one tensor a sample; scalars (a loss) are left out.

    A list with one entry a sample is taken as it is, and so is a tuple unless its tensors lie along an axis of the
    micro-batch, as a tensor must. So are lists under names.
    """
    value, sequences = take_sequences(as_tensors(_texts_for_each(value, batch.num_samples)))
    wrong = {name: len(parts) for name, parts in sequences.items() if len(parts) != batch.num_samples}
    if wrong:
        raise BatchError(
            "a packed sequence does not hold one sequence a sample",
            seen=f"{wrong} for {batch.num_samples} samples",
            do="pack one sequence for every sample, in their order",
        )
    if sequences:
        return {**sequences, **_split_tensors(value, batch, readings)}
    if _is_by_sample(value, batch):
        return split_list(value)
    value, lists = _take_lists(value, batch)
    return {**lists, **_split_tensors(value, batch, readings)}


def _take_lists(value: Any, batch: MicroBatch, name: str = "output") -> tuple[Any, PerSample]:
    """A result without the lists of one entry a sample in it, however deep they lie, and these by name."""
    if name != "output" and _is_by_sample(value, batch):
        each = split_list(value)
        return None, {name + key.removeprefix("output"): parts for key, parts in each.items()}
    if isinstance(value, Mapping):
        pairs = {k: _take_lists(v, batch, f"{name}.{k}") for k, v in value.items()}
        return {k: rest for k, (rest, _) in pairs.items()}, _merged(pairs.values())
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        found = [_take_lists(v, batch, f"{name}.{at}") for at, v in enumerate(value)]
        return type(value)(rest for rest, _ in found), _merged(found)
    return value, {}


def _texts_for_each(value: Any, number: int) -> Any:
    """A text beside the results (a name, a note) is the same for every sample."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(value, Mapping) or not any(isinstance(v, str | bytes) for v in value.values()):
        return value
    return {k: [v] * number if isinstance(v, str | bytes) else v for k, v in value.items()}


def _is_by_sample(value: Any, batch: MicroBatch) -> bool:
    """True for a list (or tuple) of results; of a single sample it may also be a list of one padded tensor."""
    if not isinstance(value, list | tuple) or len(value) != batch.num_samples:
        return False
    tensors = list(named_tensors(value).values())
    if not tensors:
        return False
    if batch.num_samples == 1:
        rows = [axis.shape for axis in batch.axes.values() if isinstance(axis, RowAxis)]
        return isinstance(value, list) and not any(t.shape[:2] in rows for t in tensors)
    if isinstance(value, list):
        return True
    holds_lists = any(isinstance(v, list) and _is_by_sample(v, batch) for v in value)
    return not holds_lists and any(t.ndim == 0 or sample_parts(t, batch) is None for t in tensors)


def _split_tensors(value: Any, batch: MicroBatch, readings: Readings | None) -> PerSample:
    out: PerSample = {}
    for name, tensor in named_tensors(value).items():
        if tensor.ndim == 0:
            continue
        parts = sample_parts(tensor, batch) if readings is None else readings.parts(name, tensor, batch)
        if parts is None:
            raise _unsplittable(name, tensor, batch)
        out[name] = parts
    return out


def split_list(values: Sequence[Any]) -> PerSample:
    """One result a sample, as a function over a list of samples gives them."""
    out: PerSample = {}
    for value in values:
        for name, tensor in named_tensors(as_tensors(value)).items():
            out.setdefault(name, []).append(tensor)
    uneven = {name: len(parts) for name, parts in out.items() if len(parts) != len(values)}
    if uneven:
        raise BatchError(
            "results of different samples have different parts",
            seen=f"{len(values)} samples, but {uneven}",
            do="return the same names for every sample",
        )
    return out


def as_tensors(value: Any) -> Any:
    """The result of a user's function with its numbers, texts, lists of numbers and NumPy arrays as tensors."""
    if isinstance(value, Mapping):
        return {key: as_tensors(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_tensors(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, PackedSequence):
        return value
    if isinstance(value, str | bytes):
        return _text_as_tensor(value)
    if isinstance(value, list | tuple):
        return _list_as_tensors(value)
    is_array = isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc"
    return torch.tensor(value) if is_array or isinstance(value, int | float) else value


def _list_as_tensors(values: Sequence[Any]) -> Any:
    """A list of numbers as one tensor, an empty one too: a sample may have generated nothing."""
    if isinstance(values, list) and not values:
        return torch.zeros(0, dtype=torch.int64)
    if values and all(isinstance(v, int | float | np.number | np.bool_) for v in values):
        return torch.tensor(values)
    if isinstance(values, list) and values and all(isinstance(v, Tensor) and v.ndim == 0 for v in values):
        return torch.stack(values)
    return (list if isinstance(values, list) else tuple)(as_tensors(part) for part in values)


def _text_as_tensor(text: str | bytes) -> Tensor:
    """[32]: a hash, so that texts are equal or not and none passes for another with padding; zeros for an empty text."""
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    digest = hashlib.sha256(content).digest() if content else bytes(32)
    return torch.tensor(list(digest), dtype=torch.uint8)


def _unsplittable(name: str, tensor: Tensor, batch: MicroBatch) -> BatchError:
    axes = {k: a.shape if isinstance(a, RowAxis) else (len(a.owner),) for k, a in batch.axes.items()}
    return BatchError(
        f"{name!r} does not hold one result a sample",
        seen=f"shape {tuple(tensor.shape)} for {batch.num_samples} samples, axes {axes}",
        do="return tensors that begin with [samples], [rows, cells] or [entries], or a list with one entry a sample",
    )


Reading = tuple[str, str]
"""Axis and form: how the part of a sample is found in a tensor."""


def sample_parts(tensor: Tensor, batch: MicroBatch) -> list[Tensor] | None:
    """The part of every sample in a tensor that lies along some axis of the micro-batch; None if it lies along none."""
    return next((_read(tensor, batch, reading) for reading in possible_readings(tensor, batch)), None)


class Readings:
    """How each output is read, where its shape allows several ways: [N, C] with as many classes as cells, say.

    Learned from samples alone, whose lengths differ: what is read rightly is possible for all of them.
    """

    def __init__(self) -> None:
        self.is_learning = False
        self._known: dict[str, set[Reading]] = {}

    def parts(self, name: str, tensor: Tensor, batch: MicroBatch) -> list[Tensor] | None:
        """The part of every sample, in the first way that was possible so far."""
        possible = possible_readings(tensor, batch)
        known = self._known.get(name)
        if self.is_learning and possible:
            common = set(possible) if known is None else known & set(possible)
            self._known[name] = known = common or set(possible)
        chosen = [r for r in possible if known is None or r in known] or possible
        return _read(tensor, batch, chosen[0]) if chosen else None


def possible_readings(tensor: Tensor, batch: MicroBatch) -> list[Reading]:
    """All ways to take a tensor apart by sample, the likeliest first.

    Besides [B, T, ...] these are [B, H, T, ...] (heads first), [T, B, ...] (time first), [B * T, ...] (flattened), one
    entry a sample, and [layers, N, ...] (states of recurrent modules).
    """
    found: list[Reading] = []
    for name, axis in batch.axes.items():
        if isinstance(axis, FlatAxis):
            is_along = tensor.shape[:1] == (len(axis.owner),) and len(axis.owner) != batch.num_samples
            found += [(name, "entries")] if is_along else []
        elif len(axis.lengths) == batch.num_samples:
            found += [(name, form) for form in _forms(tensor, axis)]
    found += [("", "sample")] if tensor.shape[:1] == (batch.num_samples,) else []
    found += [("", "state")] if tensor.ndim > 2 and tensor.shape[1] == batch.num_samples else []
    return found


def _forms(tensor: Tensor, axis: RowAxis) -> list[str]:
    B, T = axis.shape
    shape = tuple(tensor.shape)
    is_form = {
        "rows": shape[:2] == (B, T),
        "heads": len(shape) >= 3 and shape[0] == B and shape[2] == T,
        "time": shape[:2] == (T, B),
        "flattened": shape[:1] == (B * T,) and B * T != B,
    }
    return [form for form, is_so in is_form.items() if is_so]


def _read(tensor: Tensor, batch: MicroBatch, reading: Reading) -> list[Tensor]:
    name, form = reading
    if form == "sample":
        return list(tensor.unbind())
    if form == "state":
        return list(tensor.unbind(1))
    axis = batch.axes[name]
    if isinstance(axis, FlatAxis):
        return list(torch.split(tensor, list(axis.lengths)))
    B, T = axis.shape
    if form == "heads":
        tensor = tensor.transpose(1, 2)
    elif form == "time":
        tensor = tensor.transpose(0, 1)
    elif form == "flattened":
        tensor = tensor.reshape(B, T, *tensor.shape[1:])
    return list(torch.split(axis.take_tokens(tensor), list(axis.lengths)))


def take_sequences(value: Any, name: str = "output") -> tuple[Any, PerSample]:
    """A result without its PackedSequences, and these by name: a tensor for every sequence, in the order of samples."""
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return None, {name: [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]}
    if isinstance(value, Mapping):
        pairs = {k: take_sequences(v, f"{name}.{k}") for k, v in value.items()}
        return {k: rest for k, (rest, _) in pairs.items()}, _merged(pairs.values())
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        found = [take_sequences(v, f"{name}.{at}") for at, v in enumerate(value)]
        if not any(sequences for _, sequences in found):
            return value, {}
        return type(value)(rest for rest, _ in found), _merged(found)
    return value, {}


def _merged(found: Iterable[tuple[Any, PerSample]]) -> PerSample:
    return {name: parts for _, sequences in found for name, parts in sequences.items()}
