"""One micro-batch as tensors: what a forward pass and its loss need travels together.

Shapes: B rows, T cells per row, N samples, n tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from truebatch.batch.host_to_device import MovedTensors, PinnedBuffer, coalesce_pinned, send_together
from truebatch.batch.segments import Segments
from truebatch.errors import BatchError

_Move = Callable[[Tensor], Tensor]

CELLS = "cells"
SAMPLES = "samples"


@dataclass(frozen=True, slots=True, eq=False)
class RowAxis:
    """A variable-length axis laid out in rows: [B, T]."""

    segments: Segments
    """The position of every sample, for attention."""
    segment_ids: Tensor
    """[B, T] int64: 0 in empty cells, k in the cells of the k-th sample of the row."""
    positions: Tensor
    """[B, T] int64: position within its own sample, 0 in empty cells."""
    cell_of_token: Tensor
    """[n] int64: the flattened cell of every token, sample after sample. Used to scatter into the rows and gather
    back."""
    lengths: tuple[int, ...]
    """Tokens of every sample, in the order of the micro-batch; Python ints."""
    row_starts: tuple[int, ...]
    """B + 1 Python ints: samples row_starts[r] to row_starts[r + 1] are in row r. Needed for samples without tokens,
    which have no cell."""
    outer: str = ""
    """For the inner level of a nested field: the axis whose tokens are the rows of this one, in order."""

    @property
    def is_real(self) -> Tensor:
        """[B, T] bool: True where the cell holds a token."""
        return self.segments.is_real

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.segments.shape

    def take_tokens(self, values: Tensor) -> Tensor:
        """[B, T, ...] -> [n, ...]: the real cells, sample after sample."""
        return values.flatten(0, 1)[self.cell_of_token]

    def put_tokens(self, tokens: Tensor, *, pad: float = 0) -> Tensor:
        """[n, ...] -> [B, T, ...]: the inverse, back into the rows."""
        B, T = self.shape
        rows = tokens.new_full((B * T, *tokens.shape[1:]), pad)
        return rows.index_copy(0, self.cell_of_token, tokens).view(B, T, *tokens.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class FlatAxis:
    """A variable-length axis whose entries are concatenated: [n]."""

    starts: Tensor
    """[N + 1] int64: entries starts[i] to starts[i + 1] belong to the i-th sample."""
    owner: Tensor
    """[n] int64: which sample of the micro-batch each entry belongs to."""
    lengths: tuple[int, ...]
    """Entries of every sample; Python ints."""


Axis = RowAxis | FlatAxis


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """The non-blank cells of a field on a device, found on the host before the move."""

    cells: Tensor
    """[m] int64: flattened cells, in order."""
    values: Tensor
    """The field and its version: invalid once the field is replaced or written to. Only writes through `.data`, or
    outside torch, go unnoticed."""
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The samples of one forward pass. `batch["name"]` is a field; ids, positions, segments and counts come along.

    >>> from truebatch import Field, PlanConfig, build_plan, collate
    >>> rows = build_plan([2, 1], PlanConfig(layout="packed"), epoch=0).step(0)[0][0]
    >>> batch = collate([{"ids": [5 + i] * n} for i, n in zip(rows.ids, (2, 1))], rows, [Field(name="ids")])
    >>> batch["ids"].shape, batch.positions.tolist()
    (torch.Size([1, 3]), [[0, 1, 0]])
    """

    fields: Mapping[str, Tensor]
    axes: Mapping[str, Axis]
    sample_ids: tuple[int, ...]
    """In the order in which results come back."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What the loss terms of these samples are divided by, where the plan knows it."""
    host: frozenset[str] = frozenset()
    """Fields that stay on the host, whatever device the micro-batch is on."""
    blanks: Mapping[str, float] = field(default_factory=dict)
    """The `blank` of every field that has one."""
    filled: Mapping[str, Filled] = field(default_factory=dict)
    """What `filled_cells` gives for fields on a device."""
    pieces: tuple[PinnedBuffer, ...] = ()
    """Memory that its small tensors share once pinned: they go to a device in one copy. To keep one of them for long,
    keep a clone."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.fields:
            raise BatchError(
                f"the micro-batch has no field {name!r}",
                seen=f"fields {sorted(self.fields)}",
                do="declare it with Field(name=...) and return it from the dataset",
            )
        return self.fields[name]

    def rows(self, axis: str = CELLS) -> RowAxis:
        """A variable-length axis that is laid out in rows."""
        found = self.axes.get(axis)
        if not isinstance(found, RowAxis):
            raise BatchError(
                f"the micro-batch has no rows along {axis!r}",
                seen=f"axes {sorted(self.axes)}",
                do="name the axis of a field of kind 'along' or 'nested'",
            )
        return found

    def flat(self, axis: str) -> FlatAxis:
        """A variable-length axis whose entries are concatenated."""
        found = self.axes.get(axis)
        if not isinstance(found, FlatAxis):
            raise BatchError(
                f"the micro-batch has no flat entries along {axis!r}",
                seen=f"axes {sorted(self.axes)}",
                do="name the axis of a field of kind 'flat'",
            )
        return found

    @property
    def num_samples(self) -> int:
        """How many samples this forward pass has."""
        return len(self.sample_ids)

    @property
    def segments(self) -> Segments:
        """The position of every sample along `cells`, for attention."""
        return self.rows().segments

    @property
    def positions(self) -> Tensor:
        """[B, T] int64: position within its own sample."""
        return self.rows().positions

    @property
    def is_real(self) -> Tensor:
        """[B, T] bool: True where the cell holds a token."""
        return self.rows().is_real

    def filled_cells(self, name: str, *, blank: float | None = None) -> Tensor | None:
        """[m] int64: the flattened cells whose entry of this field is not blank, in order; without a device sync.

        None if that is not known: the field has no `blank`, or a different one, or was changed on a device.

        >>> import numpy as np
        >>> from truebatch import Field, collate
        >>> from truebatch.planning.rows import padded_rows
        >>> labels = Field(name="labels", pad=-100, blank=-100)
        >>> collate([{"labels": [7, -100]}, {"labels": [8]}], padded_rows(np.arange(2), 2), [labels]).filled_cells("labels")
        tensor([0, 2])
        """
        own, values = self.blanks.get(name), self.fields.get(name)
        if own is None or values is None or (blank is not None and blank != own):
            return None
        if values.device.type == "cpu":
            return _cells_other_than(values, own)
        found = self.filled.get(name)
        if found is None or found.values is not values or found.version != values._version:
            return None
        return found.cells

    def per_sample(self, values: Tensor, axis: str = CELLS) -> list[Tensor]:
        """Split a result into one tensor per sample, in the order of `sample_ids`.

        `axis` names what the leading dimensions of `values` are: a row axis [B, T, ...], a flat axis [n, ...],
        or "samples" [N, ...]. The inner axis of a nested field gives one tensor per set.
        """
        if axis == SAMPLES:
            return list(_checked(values, (self.num_samples,), axis).unbind())
        found = self.axes.get(axis)
        if isinstance(found, FlatAxis):
            return list(torch.split(_checked(values, (len(found.owner),), axis), list(found.lengths)))
        rows = self.rows(axis)
        return list(torch.split(rows.take_tokens(_checked(values, rows.shape, axis)), list(rows.lengths)))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> MicroBatch:
        """The same micro-batch on another device."""
        place = torch.device(device)
        if place.type == "cpu" and not (self.pieces or self.filled) and all(t.is_cpu for t in _tensors(self)):
            return self
        pieces, sent = send_together(self.pieces, place, non_blocking=non_blocking)
        return replace(_map(self, sent, lambda t: t.to(place, non_blocking=non_blocking)), pieces=pieces)

    def pin_memory(self) -> MicroBatch:
        """The same micro-batch in page-locked memory; loaders call it."""
        pieces, laid = coalesce_pinned(_tensors(self))
        return replace(_map(self, laid, lambda t: t.pin_memory()), pieces=pieces)

    def __getstate__(self) -> list[Any]:
        """What is pickled: every tensor with memory of its own, not the shared buffer."""
        whole = _map(self, MovedTensors(), _apart) if self.pieces else self
        return [() if part.name == "pieces" else getattr(whole, part.name) for part in dataclass_fields(self)]

    def __setstate__(self, state: list[Any]) -> None:
        for part, value in zip(dataclass_fields(self), state, strict=True):
            object.__setattr__(self, part.name, value)


def _checked(values: Tensor, leading: tuple[int, ...], axis: str) -> Tensor:
    if tuple(values.shape[: len(leading)]) != leading:
        raise BatchError(
            f"a result has no axis {axis!r}",
            seen=f"shape {tuple(values.shape)}, expected to begin with {leading}",
            do="name the axis the result has, or 'samples' for one result per sample",
        )
    return values


def _apart(values: Tensor) -> Tensor:
    return values.detach().clone().requires_grad_(values.requires_grad)


def _cells_other_than(values: Tensor, blank: float) -> Tensor | None:
    if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
        return None  # a fake or meta tensor has no data, and numpy would dereference a null pointer
    if values.is_floating_point() or type(values) is not Tensor:
        is_filled = values.reshape(-1) != blank
        has_values = type(is_filled) is Tensor  # meta tensors, for a memory estimate, have none
        return torch.from_numpy(np.flatnonzero(is_filled.numpy())) if has_values else None
    whole = int(blank) if float(blank).is_integer() else blank
    return torch.from_numpy(np.flatnonzero(values.numpy() != whole))  # three times as fast


def _tensors(batch: MicroBatch) -> Iterator[Tensor]:
    """All tensors that `_map` moves, except those it computes."""
    for axis in batch.axes.values():
        if isinstance(axis, FlatAxis):
            yield from (axis.starts, axis.owner)
        else:
            yield from (axis.segments.starts, axis.segments.is_real)
            yield from (axis.segment_ids, axis.positions, axis.cell_of_token)
    yield from (values for name, values in batch.fields.items() if name not in batch.host)


def _map(batch: MicroBatch, moved: MovedTensors, move: _Move) -> MicroBatch:
    """Move every tensor; some have been moved together already."""

    def to(tensor: Tensor) -> Tensor:
        found = moved.take(tensor)
        return move(tensor) if found is None else found

    axes: dict[str, Axis] = {}
    for name, axis in batch.axes.items():
        if isinstance(axis, FlatAxis):
            axes[name] = replace(axis, starts=to(axis.starts), owner=to(axis.owner))
        else:
            table = replace(axis.segments, starts=to(axis.segments.starts), is_real=to(axis.segments.is_real))
            axes[name] = replace(
                axis,
                segments=table,
                segment_ids=to(axis.segment_ids),
                positions=to(axis.positions),
                cell_of_token=to(axis.cell_of_token),
            )
    fields = {k: v if k in batch.host else to(v) for k, v in batch.fields.items()}
    return replace(batch, fields=fields, axes=axes, filled=_moved_filled(batch, fields, move), pieces=())


def _moved_filled(batch: MicroBatch, fields: Mapping[str, Tensor], move: _Move) -> dict[str, Filled]:
    """On the host it is always computed again, so that nothing stale is kept."""
    filled = {}
    for name in batch.blanks.keys() & fields.keys():
        values = fields[name]
        is_kept = values.device.type != "cpu" and not values.is_inference()  # without a version counter
        cells = batch.filled_cells(name) if is_kept else None
        if cells is not None:
            # Page-locked like the field itself: a copy from pageable memory would wait for the device's queued work.
            cells = cells.pin_memory() if batch.fields[name].is_pinned() else cells
            filled[name] = Filled(move(cells), values, values._version)
    return filled
