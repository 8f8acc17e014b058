"""Tensors as safetensors files, streamed one tensor at a time and hashed while they are written.

8 bytes: length of the header -> JSON header (dtype, shape, place of each tensor) -> the tensors

The library's own writer first copies every tensor to the host and cannot say when the bytes are on the disk.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load, load_file
from torch import Tensor

from truebatch.errors import CheckpointError
from truebatch.io.atomic_files import FileFacts, write_chunks

_LOG = logging.getLogger(__name__)
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_HEADER_STEP = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Write a new safetensors file onto the disk; the host needs memory for one tensor at a time."""
    # Widest first, so that every tensor begins at a multiple of its own width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return write_chunks(path, _chunks(tensors, order))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU."""
    try:
        return _load(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path.name} is not a whole safetensors file", seen=f"{path}: {error}", do="go back to an earlier one"
        ) from error


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)  # type: ignore[no-any-return]
    except (MemoryError, OSError, RuntimeError) as error:
        if "cannot allocate memory" not in str(error).lower():
            raise
        _LOG.info("%s cannot be mapped into memory; it is read instead", path)
    # After a step that ran out of memory the heap may have room for it where the process has no addresses left.
    return load(path.read_bytes())  # type: ignore[no-any-return]


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes the tensors take in a file, without the header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    return [name for name, tensor in tensors.items() if not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    return bool(torch.isfinite(wide).all())


def _chunks(tensors: Mapping[str, Tensor], order: list[str]) -> Iterator[Any]:
    header = _header(tensors, order)
    yield len(header).to_bytes(8, "little")
    yield header
    for name in order:
        if tensors[name].numel():
            yield _bytes_of(tensors[name])


def _header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in order:
        tensor = tensors[name]
        end = place + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": dtype_name(tensor.dtype, name),
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % _HEADER_STEP)


def dtype_name(dtype: torch.dtype, tensor: str = "") -> str:
    """What a dtype is called in a safetensors file; `tensor` stands in the message about one that has no name."""
    if dtype not in _NAMES or tensor == "__metadata__":
        raise CheckpointError(
            f"the tensor {tensor!r} cannot be stored in a safetensors file",
            seen=f"dtype {dtype}",
            do=f"use one of: {', '.join(str(kind).removeprefix('torch.') for kind in _NAMES)}",
        )
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype that has this name in a safetensors file; `KeyError` for any other."""
    return {known: kind for kind, known in _NAMES.items()}[name]


def _bytes_of(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
