"""A digest of every parameter and buffer, computed where it lies: two runs are compared by it, line by line.

tensor -> its bits as integers, mixed with their place -> one integer, whose sum no order changes -> 16 digits
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import RunError
from truebatch.io.atomic_files import corrupt_file_errors, read_json, storage_error, write_json

DIGESTS = "digests"
"""The folder of a run with a file for each step whose parameters were digested."""
_ENTRIES = 1 << 22
"""Mixed at a time: bounds the memory it takes."""
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_FIRST, _SECOND, _THIRD = (number - (1 << 64) if number >> 63 else number for number in _MULTIPLIERS)
_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def parameter_digests(model: nn.Module) -> dict[str, str]:
    """Name -> digest of every parameter and buffer. All ranks call it where parameters are sharded.

    >>> one, other = (torch.nn.Linear(2, 1) for _ in range(2))
    >>> parameter_digests(one)["bias"] == parameter_digests(other)["bias"], len(parameter_digests(one)["weight"])
    (False, 16)
    """
    found = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}
    sums = [mixed_bits(value.detach()) for value in whole.values()]
    numbers = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []
    return {name: _named(value, number) for (name, value), number in zip(whole.items(), numbers, strict=True)}


def _named(value: Tensor, number: int) -> str:
    said = f"{value.dtype} {tuple(value.shape)} {number}"
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def mixed_bits(value: Tensor) -> Tensor:
    """One integer that changes with every bit and every place; integers wrap around, so no order of summing matters."""
    dense = value.contiguous().flatten()
    dense = torch.view_as_real(dense).flatten() if dense.is_complex() else dense
    bits = dense.view(_KINDS[dense.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for begin in range(0, len(bits), _ENTRIES):
        part = bits[begin : begin + _ENTRIES].to(torch.int64)
        place = torch.arange(begin + 1, begin + 1 + len(part), dtype=torch.int64, device=value.device)
        mixed = (part + place * _FIRST) * _SECOND
        mixed = (mixed ^ (mixed >> 29)) * _THIRD
        total += (mixed ^ (mixed >> 32)).sum()
    return total


def joint_digest(digests: Mapping[str, str]) -> str:
    """One digest for all."""
    return hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=8).hexdigest()


def write_digests(folder: Path, step: int, digests: Mapping[str, str]) -> None:
    """Leave the digest of every tensor in the run's folder, for `truebatch diff`."""
    target = folder / DIGESTS
    try:
        target.mkdir(exist_ok=True)
        write_json(target / f"step-{step}.json", dict(digests))
    except OSError as error:
        raise storage_error(RunError, error, what=f"{DIGESTS}/step-{step}.json", folder=folder) from error


def read_digests(folder: Path, step: int) -> dict[str, str]:
    """The digests of a step; empty where the run kept none."""
    path = folder / DIGESTS / f"step-{step}.json"
    if not path.is_file():
        return {}
    with corrupt_file_errors(path, do="delete the file: the step is then compared by its losses alone"):
        found: dict[str, Any] = read_json(path, max_bytes=1 << 28)
        return {str(name): str(digest) for name, digest in found.items()}
