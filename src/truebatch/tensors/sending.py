"""Tensors of the host laid end to end on a device, without waiting for what the device still does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
