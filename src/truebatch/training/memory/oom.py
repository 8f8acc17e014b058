"""Is this error out of memory, such that a smaller micro-batch may help? One table, and how memory is given back.

error -> itself and what it was raised from -> kind, then text -> yes or no
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import gelu

from truebatch.errors import LoaderError, TruebatchError

_LOG = logging.getLogger(__name__)
KINDS = (MemoryError, torch.OutOfMemoryError)
"""What is out of memory by its type: NumPy's own is a MemoryError."""

NO_KERNEL = r"\bcould not create a primitive\b(?! descriptor)"
"""oneDNN had no memory to make a kernel; one that it cannot do fails earlier, at the descriptor."""

TEXTS = (
    r"\b(cuda|hip|xpu|npu|mlu|musa|mps backend|mps|hpu|gcu|sdaa|supa|privateuse\w*) out of memory\b",
    r"\b(cuda|cuda driver|cuda runtime|hip|npu|musa) (error|failure)\b[^\n]{0,40}\bout of memory\b",
    r"\bunhandled cuda error\b.*\bout of memory\b",
    r"\bnccl\b.*\bout of memory\b",
    r"\b(cuda|hip)error(outofmemory|memoryallocation)\b",
    r"\b(cuda|cu)_error_out_of_memory\b",
    r"\b(cublas|cudnn|cusolver|cusparse|curand|rocblas|hipblas|miopen)_?status_?alloc_?failed\b",
    r"\bcudnn_status_internal_error_(device|host)_allocation_failed\b",
    r"\b(cufft|hipfft)_?alloc_?failed\b",
    r"\bdefaultcpuallocator: (can't allocate memory|not enough memory)",
    r"\bnot enough memory: you tried to allocate\b",
    r"\bmps\b.*\binvalid buffer size\b|\binvalid buffer size: [\d.]+ ?[kmgt]i?b\b",
    r"\bfailed to allocate (private|shared) mtlbuffer\b",
    r"\b(pi|ur_result)_error_out_of_(resources|device_memory|host_memory)\b",
    r"\bpt_devmem allocation failed\b",
    r"\bresource_exhausted: (out of memory|error allocating)",
    r"\b(aclrtmalloc|el0004)\b.*\b(fail|allocate)",
    r"\bstd::bad_alloc\b",
    NO_KERNEL,
)
"""What a RuntimeError says when a device, a library or the host has no memory left."""

OTHERS = (
    r"\bout of resources?: ",
    r"\boutofresources\b",
    r"\bout of shared memory\b",
)
"""Shared memory of a kernel, or of processes: no smaller micro-batch helps, whatever else the text says."""

_NO_KERNEL = re.compile(NO_KERNEL, re.IGNORECASE)
_NO = re.compile("|".join(OTHERS), re.IGNORECASE)
_YES = re.compile("|".join(f"(?:{text})" for text in TEXTS), re.IGNORECASE | re.DOTALL)
_BY_WORKER = re.compile(r"^\w*(MemoryError|OutOfMemoryError)\b")
_LONGEST_CHAIN = 32


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out here, or in what this error was raised from; a smaller micro-batch may then help.

    Shared memory of a kernel (Triton), addresses out of bounds and faults of a device are not that.
    """
    return any(_is_one(link) for link in _chain(error))


def first_line(error: BaseException) -> str:
    """What an error says, briefly. Text may leave an `except` block; the error itself would keep its tensors alive."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def forget_probes(device: torch.device) -> None:
    """A run begins with the memory that probes have filled given back, and tells its own peak, not theirs."""
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device, *, said: str = "") -> None:
    """Give back what nobody refers to. Call it outside the `except` block: a traceback keeps its tensors alive.

    `said`: the text of the error for which memory is freed.
    """
    gc.collect()
    empty = getattr(getattr(torch, device.type, None), "empty_cache", None)
    if device.type == "cpu":
        _give_heap_back()
    elif empty is not None:
        empty()
    if _NO_KERNEL.search(said):
        _leave_broken_kernels()


def _give_heap_back() -> None:
    """The C library keeps what was freed, up to 32 MiB apiece, for itself; where it has a way to give it back, it does."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _c_library() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


_new_sizes = itertools.count(3)


def _leave_broken_kernels() -> None:
    """Do without oneDNN once it has run out of memory while it made a kernel: it remembers that (uxlfoundation/oneDNN#5907),
    and in this thread every kernel for another shape fails from then on, however much memory there is."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
        return
    try:
        gelu(torch.zeros(next(_new_sizes), dtype=torch.float32, device="cpu"))
    except Exception as error:  # memory runs out in errors of many classes
        if not is_out_of_memory(error):
            raise
        is_broken = bool(_NO_KERNEL.search(str(error)))
    else:
        return
    if is_broken:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        _LOG.warning(
            "memory ran out while oneDNN made a kernel, after which it makes none in this thread: this process goes on "
            "with torch's own kernels, some of which are slower"
        )


def _is_one(error: BaseException) -> bool:
    text = str(error)
    if _NO.search(text):
        return False
    if isinstance(error, LoaderError):  # from a worker process: the error itself could not come along, its text did
        return bool(_BY_WORKER.match(error.seen) or _YES.search(error.seen))
    if isinstance(error, TruebatchError):  # a MemoryLimitError too: whoever raised it knew that no smaller cut helps
        return False
    if isinstance(error, KINDS):
        return True
    return isinstance(error, RuntimeError) and bool(_YES.search(text))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, the members of a group, and what each was raised from; each once."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _LONGEST_CHAIN:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
        before = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        waiting += [before] if before is not None else []
