"""How fast the parts of the demo are, by CPU time, and why a batch may be slower than its samples one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch

ONE_BY_ONE = 1.0
BY_CPU_TIME = "   speeds are by CPU time, so that time taken by other programs does not count"


def cpu_seconds() -> float:
    """CPU time of this process: the demo runs on one thread, so nothing is counted twice."""
    return time.process_time()


@contextmanager
def one_thread() -> Iterator[None]:
    """A model this small gains little from threads, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CpuClock:
    """A logger that takes the CPU time of every step."""

    def __init__(self) -> None:
        self._times = list[float]()

    def begin(self, step: int, num_steps: int) -> None:
        """The first step begins."""
        self._times.append(cpu_seconds())

    def record(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""
        self._times.append(cpu_seconds())

    def close(self) -> None:
        """Nothing is open."""

    def usual_step(self) -> float:
        """Seconds of the step in the middle: a few take far longer."""
        return median(b - a for a, b in pairwise(self._times))


def why_slower(name: str, speed: float, *, cells: int, tokens: int) -> str:
    """A line for a batch that was slower than one by one; empty for any other."""
    if round(speed, 1) >= ONE_BY_ONE:
        return ""
    if cells > tokens:
        return f"   {name} was slower than one by one: {1 - tokens / cells:.0%} of its cells are padding"
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        return f"   {name} was slower than one by one: {load:.0f} programs share {cores} cores and their caches"
    return f"   {name} was slower than one by one: this processor gains nothing from larger products"


def write_reasons(write: Callable[[str], None], rows: Sequence[tuple[str, float, int]], *, tokens: int) -> None:
    """A line for every batch that was slower; of each its name, its speed beside one by one and its cells."""
    for name, speed, cells in rows:
        if line := why_slower(name, speed, cells=cells, tokens=tokens):
            write(line)
