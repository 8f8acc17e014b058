"""Kernels that repeat themselves: the same inputs give the same bits in every call and every process of one kind of machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from truebatch.errors import ConfigError

WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""cuBLAS repeats itself with workspaces of a fixed size."""
_NONE = "does not have a deterministic implementation"


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Only kernels that repeat themselves, inside the `with` block; torch raises for an operation that has none.

    On a CPU sums are cut by the number of threads, which differs from machine to machine: there is one thread.
    """
    was_on, was_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark, fills = torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    threads = torch.get_num_threads()
    if device.type == "cuda":
        _fix_workspace()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warned)
        torch.backends.cudnn.benchmark = benchmark
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.set_num_threads(threads)


def _fix_workspace() -> None:
    """cuBLAS reads the variable when it first multiplies; a value that makes it repeat itself stays."""
    if os.environ.get(WORKSPACE) not in (FIXED, ":16:8"):
        os.environ[WORKSPACE] = FIXED


def no_deterministic_kernel(error: BaseException) -> ConfigError | None:
    """The error of an operation that has no kernel which repeats itself, by name; None for any other error."""
    said = str(error)
    if not isinstance(error, RuntimeError) or _NONE not in said:
        return None
    name = said.partition(_NONE)[0].strip().splitlines()[-1]
    return ConfigError(
        f"{name} has no kernel that gives the same bits twice",
        seen=f"{said.splitlines()[0][:200]}",
        do="use another operation there, or train with exactness: rounding; --debug shows the line",
    )
