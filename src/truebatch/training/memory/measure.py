"""How many bytes a piece of work takes at its peak: from the allocator on CUDA, by counting storages elsewhere."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 2**30
ADDRESSES_OF_THREADS = 256 * 2**20
"""A run starts a few threads, each of which takes 72 MiB of addresses for its stack and its heap, used or not."""
_CGROUP = Path("/sys/fs/cgroup")


def added_bytes(work: Callable[[], object], *, device: torch.device) -> int:
    """The most bytes of tensors alive at once while `work` runs, beyond those alive before it.

    On CUDA the allocator says it, rounding included. Elsewhere every storage an operation returns is counted from
    then until nobody refers to it (saved for backward, too), so the number is the same each time; what a kernel
    takes and gives back inside one operation is not seen.
    """
    gc.collect()  # A cycle that dies during the work would look like memory given back by it.
    if device.type == "cuda":
        return _from_allocator(work, device)
    with CountStorages() as count:
        work()
    return int(count.peak_bytes)


def _from_allocator(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


class CountStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, counts the bytes of storages made by operations and not yet freed. Views share a storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()
        self._ends: list[weakref.finalize[Any, Any]] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for end in self._ends:
            end.detach()  # What outlives the block is nobody's business here any more.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What an operation reads was there before it: not counted, also where the result is the same storage.
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, is_new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._note(tensor, is_new=True)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out

    def _note(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        num_bytes = storage.nbytes() if is_new else 0
        self._known.add(address)
        self.live_bytes += num_bytes
        end = weakref.finalize(storage, self._forget, address, num_bytes)
        end.atexit = False
        self._ends.append(end)

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.live_bytes -= num_bytes


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def usable_bytes(free_bytes: int, device: torch.device) -> int:
    """How much of the free memory can hold tensors. On a GPU some goes to gaps between blocks: a twentieth, at least a
    gibibyte (blocks are no smaller on a small GPU), but no more than a tenth."""
    if device.type != "cuda":
        return free_bytes
    return free_bytes - int(max(0.05 * free_bytes, min(GIB, 0.1 * free_bytes)))


def free_bytes_of(device: torch.device) -> int:
    """Bytes this process may still take on a device: what is free, and what torch holds without using it.

    A share of a GPU that was set for the process (`torch.cuda.set_per_process_memory_fraction`) is kept to, and so are the
    limits of a container and of the process (`ulimit -v`).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device.index)) - reserved
        return max(0, min(int(free), allowed)) + reserved - torch.cuda.memory_allocated(device)
    return min([int(psutil.virtual_memory().available), *_container_bytes(), *_process_bytes()])


def _process_bytes() -> list[int]:
    """What the limit of this process's addresses leaves, where there is one."""
    if sys.platform != "linux":
        return []
    process = psutil.Process()
    limit = process.rlimit(psutil.RLIMIT_AS)[0]
    room = limit - int(process.memory_info().vms) - ADDRESSES_OF_THREADS
    return [] if limit == psutil.RLIM_INFINITY else [max(0, room)]


def _container_bytes() -> list[int]:
    """What a container leaves free, where there is one with a limit."""
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not (limit.is_file() and used.is_file()):
        return []
    text = limit.read_text().strip()
    return [max(0, int(text) - int(used.read_text()))] if text.isdigit() else []
