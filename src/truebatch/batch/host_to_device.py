"""Small tensors of one kind in one piece of page-locked memory: a card gets them all by one copy.

tensors of the host -> pieces of memory, and each of them in its piece -> the pieces on the card, and each of them there

A copy takes the host some fifty microseconds, however small it is, and of a micro-batch's tensors most say something of
every cell in int64. What shares a piece shares its memory and nothing else: see `Piece`.

Tensors of the host laid end to end on a device, without waiting for what the device still does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_BYTES = 2**20
"""Larger tensors are copied by themselves: laid together they would have to find room as one."""
LEAST_SHARE = 8
"""A tensor that is so many times smaller than the largest of its kind is copied by itself too: whoever keeps it, such as one
number a sample, would keep the memory of all."""
ALIGNED = 128
"""Bytes: every tensor begins at a multiple, as kernels that read many at a time like it."""


@dataclass(frozen=True, slots=True, eq=False)
class PinnedBuffer:
    """Tensors that lie in one memory. Each counts its own writes: of views of one tensor, a write into one would count as a
    write into all. Whoever keeps one of them keeps the memory of all."""

    memory: Tensor
    """One-dimensional."""
    members: tuple[Tensor, ...]


class MovedTensors:
    """Tensors in their new place, by the tensors they were. Those are kept until it is forgotten: what knows an object by
    its number has to keep it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, old: Tensor, new: Tensor) -> None:
        """`new` is what `old` became."""
        self._found[id(old)] = old, new

    def take(self, old: Tensor) -> Tensor | None:
        """What it became, and None if it was not moved, or was asked for before: two places never get one tensor."""
        found = self._found.pop(id(old), None)
        return None if found is None else found[1]


def coalesce_pinned(tensors: Iterable[Tensor], *, pin: bool = True) -> tuple[tuple[PinnedBuffer, ...], MovedTensors]:
    """Those of the tensors that are small and plain, copied into page-locked pieces; a kind of which there is only one is
    left out. Without `pin` it is plain memory, of machines without a card."""
    kinds: dict[torch.dtype, dict[int, Tensor]] = {}
    for tensor in tensors:
        if _is_small(tensor):
            kinds.setdefault(tensor.dtype, {})[id(tensor)] = tensor
    pieces, moved = [], MovedTensors()
    for dtype, found in kinds.items():
        largest = max(tensor.nbytes for tensor in found.values())
        some = [tensor for tensor in found.values() if tensor.nbytes * LEAST_SHARE >= largest]
        if len(some) < 2:
            continue
        places, end = [], 0
        for tensor in some:
            places.append(end)
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED // dtype.itemsize
        memory = torch.empty(end, dtype=dtype, device="cpu", pin_memory=pin)
        members = []
        for tensor, place in zip(some, places, strict=True):
            member = memory[place : place + tensor.numel()].view(tensor.shape).copy_(tensor).data
            members.append(member)
            moved.put(tensor, member)
        pieces.append(PinnedBuffer(memory, tuple(members)))
    return tuple(pieces), moved


def send_together(
    pieces: Sequence[PinnedBuffer], device: torch.device, *, non_blocking: bool
) -> tuple[tuple[PinnedBuffer, ...], MovedTensors]:
    """The pieces on a device, and each of their members there. One that was made something else since, such as a leaf with
    a gradient, is left out."""
    there, moved = [], MovedTensors()
    for piece in pieces:
        memory = piece.memory.to(device, non_blocking=non_blocking)
        if memory is piece.memory:
            there.append(piece)
            continue
        members = []
        for member in piece.members:
            if _lies_in(member, piece.memory):
                new = memory.as_strided(member.shape, member.stride(), member.storage_offset()).data
                members.append(new)
                moved.put(member, new)
        there.append(PinnedBuffer(memory, tuple(members)))
    return tuple(there), moved


def _is_small(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    is_plain = tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj())
    return is_plain and not tensor.is_neg() and 0 < tensor.nbytes <= MOST_BYTES


def _lies_in(member: Tensor, memory: Tensor) -> bool:
    is_there = member.dtype == memory.dtype and member.untyped_storage().data_ptr() == memory.data_ptr()
    return is_there and not member.requires_grad


def send(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """`torch.cat(parts)` on `device`.

    From the host to a card it goes through page-locked memory: a copy out of other memory waits until the card has done
    all it was asked for before.
    """
    if device.type != "cuda" or any(part.device.type != "cpu" for part in parts):
        return torch.cat([part.to(device) for part in parts])
    first = parts[0]
    if any(part.dtype != first.dtype for part in parts):
        return torch.cat(list(parts)).pin_memory().to(device, non_blocking=True)
    cells = sum(len(part) for part in parts)
    held = torch.empty((cells, *first.shape[1:]), dtype=first.dtype, device="cpu", pin_memory=True)
    torch.cat(list(parts), out=held)
    return held.to(device, non_blocking=True)
