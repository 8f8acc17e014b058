"""Small tensors in one piece of page-locked memory: a card gets them all by one copy.

tensors of the host -> one piece of memory, and each of them in it -> the piece on the card, and each of them in it there

A copy takes the host some fifty microseconds, however small it is, and a micro-batch has ten tensors beside its large ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MOST_BYTES = 2**20
"""Larger tensors are copied by themselves: laid together they would have to find room as one."""
ALIGNED = 128
"""Bytes: every tensor begins at a multiple, as kernels that read many at a time like it."""


def lay_together(tensors: Iterable[Tensor], *, pin: bool = True) -> tuple[Tensor | None, dict[int, Tensor]]:
    """One piece of page-locked memory, and by their `id` those of the tensors that were copied into it: not those that
    are large, empty, or more than plain numbers in a row. None where there are not even two. Without `pin` it is plain
    memory, of machines without a card."""
    small = {id(tensor): tensor for tensor in tensors if _is_small(tensor)}
    if len(small) < 2:
        return None, {}
    places, end = {}, 0
    for number, tensor in small.items():
        places[number] = end
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    held = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    laid = {}
    for number, tensor in small.items():
        place = held[places[number] : places[number] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        laid[number] = place.copy_(tensor).data  # counts writes of its own: see `send_together`
    return held, laid


def send_together(
    held: Tensor, tensors: Iterable[Tensor], device: torch.device, *, non_blocking: bool
) -> dict[int, Tensor]:
    """By their `id`, those of the tensors that lie in `held`, on a device. They share memory and nothing else: of views of
    one tensor, a write into one would count as a write into all."""
    address = held.data_ptr()
    inside = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() == address]
    if len(inside) < 2:
        return {}
    there = held.to(device, non_blocking=non_blocking)
    kinds = {dtype: there.view(dtype) for dtype in {tensor.dtype for tensor in inside}}
    return {
        id(tensor): kinds[tensor.dtype].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).data
        for tensor in inside
    }


def _is_small(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    is_plain = tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_quantized
    return is_plain and 0 < tensor.nbytes <= MOST_BYTES
