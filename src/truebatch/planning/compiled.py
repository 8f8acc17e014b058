"""Runs the loops of `kernels`: compiled by numba when it is there and pays, else by Python, with the same result."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from truebatch.planning import kernels

_PAYS_FROM = 20_000
"""Samples from which loading numba is quicker than doing without it."""


def is_slow(num: int) -> bool:
    """Whether loops over `num` samples will be run by Python itself."""
    wish = os.environ.get("TRUEBATCH_NUMBA", "")
    if wish == "0" or not _has_numba():
        return True
    return wish != "1" and num < _PAYS_FROM


def call(name: str, *arguments: Any, num: int | None = None) -> int:
    """Run one loop; arrays are changed in place, at most the leading ones that the loop names as its results."""
    kernel = kernels.KERNELS[name]
    work = num if num is not None else max(len(a) for a in arguments if isinstance(a, np.ndarray))
    if not is_slow(work):
        return int(_compile(name)(*(_writable(a) for a in arguments)))
    lists = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
    answer = kernel.loop(*lists)
    for array, values in zip(arguments[: kernel.results], lists, strict=False):
        array[:] = values
    return int(answer)


def _writable(argument: Any) -> Any:
    # A read-only array (a plan opened from a file) is another type to numba and would be compiled for again.
    is_frozen = isinstance(argument, np.ndarray) and not argument.flags.writeable
    return argument.copy() if is_frozen else argument


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _compile(name: str) -> Callable[..., int]:
    import numba
    from numba.extending import register_jitable

    _register(register_jitable)
    compiled: Callable[..., int] = numba.njit(cache=True)(kernels.KERNELS[name].loop)
    return compiled


@functools.cache
def _register(register: Callable[[Any], Any]) -> None:
    for part in kernels.PARTS:
        register(part)
