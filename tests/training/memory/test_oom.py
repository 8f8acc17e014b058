"""Out of memory is told from everything else: real errors where they can be made, collected texts where not."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from truebatch.errors import BatchError, LoaderError
from truebatch.training.memory.oom import free_memory, is_out_of_memory

OUT_OF_MEMORY = {
    "torch on cuda": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.19 GiB is "
        "free. Including non-PyTorch memory, this process has 138.52 GiB memory in use. Of the allocated memory 137.00 "
        "GiB is allocated by PyTorch, and 412.00 MiB is reserved by PyTorch but unallocated."
    ),
    "torch.cuda's name": torch.cuda.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
    "older torch": RuntimeError(
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.56 GiB already allocated)"
    ),
    "cuda outside the allocator": RuntimeError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    ),
    "accelerator error": torch.AcceleratorError("CUDA error: out of memory")
    if hasattr(torch, "AcceleratorError")
    else RuntimeError("CUDA error: out of memory"),
    "cuda driver": RuntimeError("CUDA driver error: out of memory"),
    "cuda runtime": RuntimeError("cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCStorage.cu:58"),
    "cuda by name": RuntimeError("cudaErrorMemoryAllocation: out of memory"),
    "driver by name": RuntimeError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cudnn 9": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cusolver": RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    "cusparse": RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    "cufft": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "nccl": RuntimeError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nFailed to CUDA calloc async 608 bytes: Cuda failure 2 'out of memory'"
    ),
    "hip": torch.OutOfMemoryError(
        "HIP out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 63 GiB"
    ),
    "hip by name": RuntimeError("HIP error: hipErrorOutOfMemory"),
    "mps": RuntimeError(
        "MPS backend out of memory (MPS allocated: 17.94 GiB, other allocations: 112.00 MiB, max allowed: 18.13 GiB)."
    ),
    "mps buffer": RuntimeError("Invalid buffer size: 24.00 GiB"),
    "metal": RuntimeError("Failed to allocate private MTLBuffer for size 4294967296"),
    "xpu": torch.OutOfMemoryError("XPU out of memory. Tried to allocate 4.00 GiB (GPU 0; 15.91 GiB total capacity)"),
    "sycl": RuntimeError("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"),
    "level zero": RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "npu": RuntimeError("NPU out of memory. Tried to allocate 512.00 MiB (NPU 0; 60.97 GiB total capacity)"),
    "ascend": RuntimeError(
        "EL0004: [PID: 77] Failed to allocate memory. Possible Cause: Available memory is insufficient"
    ),
    "gaudi": RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB"),
    "xla": RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "cpu on windows": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."
    ),
    "onednn, seen under a limit": RuntimeError("could not create a primitive"),
    "python": MemoryError(),
    "c++": MemoryError("std::bad_alloc"),
    "dataloader": RuntimeError(
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"
    ),
    "our worker": LoaderError(
        "step 3, micro-batch 0 with samples [1] could not be collated", seen="MemoryError: ", do="see the traceback"
    ),
    "numpy in our worker": LoaderError(
        "sample 4 could not be loaded", seen="_ArrayMemoryError: Unable to allocate 7 TiB", do="see the traceback"
    ),
    "a group": ExceptionGroup("two failed", [ValueError("x"), MemoryError()]),
}

OTHERS = {
    "triton": RuntimeError(
        "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages`"
    ),
    "triton by inductor": RuntimeError(
        "No valid triton configs. OutOfMemoryError: out of resource: triton_per_fused_0 Required: 262144 Hardware limit"
    ),
    "triton's class": type("OutOfResources", (Exception,), {})("out of resource: threads, Required: 2048"),
    "shared memory of processes": RuntimeError(
        "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit."
    ),
    "a killed worker": RuntimeError("DataLoader worker (pid 4242) is killed by signal: Killed. "),
    "mapped file": RuntimeError("unable to mmap 1024 bytes from file </torch_12_3>: Cannot allocate memory (12)"),
    "fork": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
    "device assert": RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronous"),
    "illegal access": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "misaligned": RuntimeError("CUDA error: misaligned address"),
    "configuration": RuntimeError("CUDA error: invalid configuration argument"),
    "launch resources": RuntimeError("CUDA error: too many resources requested for launch"),
    "launch failure": RuntimeError("CUDA error: unspecified launch failure"),
    "no kernel": RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    "no device": RuntimeError("Found no NVIDIA driver on your system."),
    "cublas not ready": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cublas execution": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    "cudnn unsupported": RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in"
    ),
    "cudnn parameter": RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    "nccl": RuntimeError(
        "NCCL error: unhandled system error, NCCL version 2.27.5\nncclSystemError: connection refused"
    ),
    "nccl timeout": RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)"),
    "sizes": RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1"),
    "index": IndexError("index out of range in self"),
    "sharing": RuntimeError("Attempting to access memory that is not owned: one input is out of its memory format"),
    "memory format": RuntimeError("required rank 4 tensor to use channels_last memory_format"),
    "overlap": RuntimeError(
        "unsupported operation: some elements of the input tensor refer to a single memory location"
    ),
    "key": KeyError("memory"),
    "a user's words": ValueError("the model is out of memory slots: 16 of 16 used"),
    "a user's text": ValueError("CUDA out of memory"),
    "file": FileNotFoundError(errno.ENOENT, "No such file or directory", "cuda_out_of_memory.txt"),
    "recursion": RecursionError("maximum recursion depth exceeded"),
    "backward twice": RuntimeError("Trying to backward through the graph a second time"),
    "ours": BatchError("the count of 'nll' is not what was declared", seen="3", do="count memory"),
    "interrupt": KeyboardInterrupt(),
    "timeout": TimeoutError("out of time"),
    "a loader's other error": LoaderError("sample 3 could not be loaded", seen="KeyError: 'memory'", do="see it"),
}


def test_the_tables_are_as_long_as_promised():
    assert len(OUT_OF_MEMORY) >= 24
    assert len(OTHERS) >= 24


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_out_of_memory_is_recognised(name):
    assert is_out_of_memory(OUT_OF_MEMORY[name])


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_taken_for_it(name):
    assert not is_out_of_memory(OTHERS[name])


def chained(inner, *, how):
    """An error raised from, or while handling, another one."""
    try:
        try:
            raise inner
        except type(inner) as error:
            if how == "cause":
                raise ValueError("the layer failed") from error
            if how == "hidden":
                raise ValueError("handled") from None
            raise ValueError("while handling")  # noqa: B904 - what happens where nobody thinks of `from`
    except ValueError as outer:
        return outer


def test_an_error_raised_from_it_is_out_of_memory_and_one_raised_instead_of_it_is_not():
    assert is_out_of_memory(chained(MemoryError(), how="cause"))
    assert is_out_of_memory(chained(MemoryError(), how="context"))
    assert not is_out_of_memory(chained(MemoryError(), how="hidden"))
    assert not is_out_of_memory(chained(KeyError("memory"), how="cause"))


def test_a_chain_that_bites_its_tail_ends():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)


REAL = """
import json, resource, sys
import numpy as np, torch
from truebatch.training.memory.oom import is_out_of_memory
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (256 << 20), -1))
n = 1 << 28  # 1 GiB of float32
small = torch.ones(1 << 14, requires_grad=True)
class Grows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, g): return g + torch.zeros(n)[: len(g)]
ways = {
    "torch.empty": lambda: torch.empty(n),
    "torch.zeros": lambda: torch.zeros(n),
    "an operation": lambda: small[:, None] * small[None, :].double(),
    "a product": lambda: torch.ones(1 << 15, 1) @ torch.ones(1, 1 << 15),
    "backward": lambda: Grows.apply(small).sum().backward(),
    "repeat": lambda: torch.ones(1024).repeat(1 << 18),
    "numpy": lambda: np.zeros(n, dtype=np.float32) + 1,
    "numpy to torch": lambda: torch.from_numpy(np.ones(n, dtype=np.float32)),
    "bytes": lambda: bytearray(4 * n),
    "a list": lambda: [0] * n,
    "a text": lambda: "x" * (4 * n),
}
found = {}
for name, way in ways.items():
    try:
        way()
        found[name] = "did not fail"
    except BaseException as error:
        found[name] = [type(error).__name__, is_out_of_memory(error)]
print(json.dumps(found))
"""


def test_real_ones_on_the_host_are_recognised():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 10
    assert {name: how for name, how in found.items() if how[1] is not True} == {}


def test_numpys_own_error_is_recognised():
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 60, dtype=np.uint8)
    assert type(caught.value) is not MemoryError
    assert is_out_of_memory(caught.value)


def test_freeing_memory_lets_cycles_go():
    """An error kept by its own traceback is a cycle: only the collector ends it."""

    class Cycle:
        pass

    one = Cycle()
    one.itself, gone = one, weakref.ref(one)
    del one
    free_memory(torch.device("cpu"))
    assert gone() is None
