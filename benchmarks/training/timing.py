"""Time one way of training: rounds over the same micro-batches, the optimiser's update, memory, and a profile."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.training.methods import Way

GIB = 2**30
HOST_LOOKS = 3
"""Micro-batches of which the host's time is the median."""


def time_rounds(
    way: Way, batches: Sequence[Any], device: torch.device, *, seconds: float, least: int = 2
) -> list[float]:
    """Seconds of every round over all micro-batches: at least `least` rounds, at most nine."""
    took: list[float] = []
    began = time.monotonic()
    while len(took) < least or (len(took) < 9 and time.monotonic() - began < seconds):
        took.append(time_once(lambda: _run_all(way, batches), device))
    return took


def _run_all(way: Way, batches: Sequence[Any]) -> None:
    for batch in batches:
        way.run(batch)


def time_once(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run of `work`: by events on a GPU, of one thread in CPU seconds, of several by the clock."""
    if device.type != "cuda":
        # CPU seconds leave out other work on the machine; of several threads they would count waiting for each other.
        now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        began = now()
        work()
        return now() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def median_host_seconds(way: Way, batches: Sequence[Any], device: torch.device) -> float:
    """What the host needs to launch one micro-batch of ours, the GPU idle before; 0 where there is no GPU."""
    if device.type != "cuda" or way.is_other:
        return 0.0
    took = []
    for batch in batches[:HOST_LOOKS]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        way.run(batch)
        took.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return statistics.median(took)


def time_update(model: Any, device: torch.device) -> float:
    """Seconds of one AdamW update of all parameters, in place on zero gradients; its states stay allocated."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=device.type == "cuda")
    optimiser.step()
    model.optimiser_of_benchmark = [optimiser]  # a list, so that it is no module; kept for the peak of memory
    return statistics.median(time_once(optimiser.step, device) for _ in range(3))


def measure_peak(device: str) -> float:
    """TFLOP/s of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        one @ other
    times = [time_once(lambda: [one @ other for _ in range(10)], torch.device(device)) for _ in range(5)]
    return 10 * 2 * size**3 / statistics.median(times) / 1e12


def print_profile(title: str, way: Way, batches: Sequence[Any]) -> None:
    """The operations that take most of the time of one way."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    on_card = torch.cuda.is_available()
    kinds += [torch.profiler.ProfilerActivity.CUDA] if on_card else []
    with torch.profiler.profile(activities=kinds) as profile:
        _run_all(way, batches)
        if on_card:
            torch.cuda.synchronize()
    found = profile.key_averages()
    for order in ("self_device_time_total", "self_cpu_time_total")[0 if on_card else 1 :]:
        sys.stdout.write(f"\nprofile of {title}, {len(batches)} micro-batches, by {order}\n")
        sys.stdout.write(found.table(sort_by=order, row_limit=45, max_name_column_width=70) + "\n")


def pin_batch(batch: Any, device: torch.device) -> Any:
    """The micro-batch in page-locked memory, if it goes to a GPU."""
    if device.type != "cuda":
        return batch
    if isinstance(batch, tuple):
        return tuple(part.pin_memory() for part in batch)
    if isinstance(batch, dict):
        return {name: part.pin_memory() if isinstance(part, torch.Tensor) else part for name, part in batch.items()}
    return batch.pin_memory()


def num_compilations() -> int:
    """Graphs that torch compiled so far in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def forget_models() -> None:
    """Give back the memory of models that nobody holds, and what was compiled for them."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure the peak of memory anew."""
    gc.collect()  # a compiled model of another way may still lie there
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float:
    """The peak of memory on the GPU since then; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
