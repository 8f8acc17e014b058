"""Coalesce small host tensors in pinned memory, so that they reach a GPU in one copy.

host tensors -> pinned buffers with views of them -> the buffers on the GPU, with the same views

A copy takes the host some fifty microseconds, however small it is, and most of a micro-batch's tensors hold one int64
per cell. Tensors in one buffer share its memory and nothing else: see `PinnedBuffer`.

Host tensors can also be concatenated on a device without waiting for its queued work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_BYTES = 2**20
"""Larger tensors are copied separately: together they would need one large allocation."""
LEAST_SHARE = 8
"""A tensor this many times smaller than the largest of its dtype is copied separately too: a reference to it (one
number per sample, say) would keep the whole buffer alive."""
ALIGNED = 128
"""Bytes: every tensor starts at a multiple of this, for vectorised kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class PinnedBuffer:
    """Tensors in one buffer. Each has its own version counter, which views of one tensor would share. A reference to
    one of them keeps the whole buffer alive."""

    memory: Tensor
    """One-dimensional."""
    members: tuple[Tensor, ...]


class MovedTensors:
    """Moved tensors by their originals. The originals are kept alive, because they are looked up by
    id()."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, old: Tensor, new: Tensor) -> None:
        """Record that `old` was moved to `new`."""
        self._found[id(old)] = old, new

    def take(self, old: Tensor) -> Tensor | None:
        """The moved tensor; None if it was not moved or was already taken, so that two places never share a tensor."""
        found = self._found.pop(id(old), None)
        return None if found is None else found[1]


def coalesce_pinned(tensors: Iterable[Tensor], *, pin: bool = True) -> tuple[tuple[PinnedBuffer, ...], MovedTensors]:
    """Copy the small, plain tensors into pinned buffers; a dtype with only one is left out. Without `pin` the memory is
    pageable, for machines without a GPU."""
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
    """Move the buffers to a device, with views of their tensors there. A tensor that has changed since, such as a leaf
    with a gradient, is left out."""
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

    From the host to a GPU it goes through pinned memory: a copy from pageable memory waits until the GPU has finished
    its queued work.
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
