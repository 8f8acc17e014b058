"""Run the loops of `registry`: compiled by numba if it is installed and worth it, else in Python, with the same
result."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from truebatch.planning.loops import registry

_LOG = logging.getLogger(__name__)
_PAYS_FROM = 20_000
"""Number of samples from which loading numba pays off."""


def is_slow(num: int) -> bool:
    """True if loops over `num` samples will run in plain Python."""
    wish = os.environ.get("TRUEBATCH_NUMBA", "")
    if wish == "0" or (wish != "1" and num < _PAYS_FROM):
        return True
    return _load_numba() is None


def call(name: str, *arguments: Any, num: int | None = None) -> int:
    """Run one loop; arrays are changed in place, only the leading ones that the loop declares as results."""
    kernel = registry.KERNELS[name]
    work = num if num is not None else max(len(a) for a in arguments if isinstance(a, np.ndarray))
    if not is_slow(work):
        return int(_compile(name)(*(_writable(a) for a in arguments)))
    lists = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
    answer = kernel.loop(*lists)
    for array, values in zip(arguments[: kernel.results], lists, strict=False):
        array[:] = values
    return int(answer)


def _writable(argument: Any) -> Any:
    # A read-only array (a plan opened from a file) is another type to numba and would trigger another compilation.
    is_frozen = isinstance(argument, np.ndarray) and not argument.flags.writeable
    return argument.copy() if is_frozen else argument


@functools.cache
def _load_numba() -> Any:
    """numba, or None if it is missing or does not support this version of NumPy."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module("numba")
    except ImportError as error:
        _LOG.warning("numba cannot be used (%s): planning is slower, the plan is the same", error)
        return None


@functools.cache
def _compile(name: str) -> Callable[..., int]:
    numba = _load_numba()
    _register_parts()
    loop = registry.KERNELS[name].loop
    try:
        compiled: Callable[..., int] = numba.njit(cache=True)(loop)
    except RuntimeError:  # no writable cache folder: compile again in every process
        compiled = numba.njit(loop)
    return compiled


@functools.cache
def _register_parts() -> None:
    register = importlib.import_module("numba.extending").register_jitable
    for part in registry.PARTS:
        register(part)
