"""Values in consecutive segments (CSR): `values[starts[i]:starts[i + 1]]` is segment i."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.planning.loops import jit
from truebatch.planning.rows import Ints


def stable_order(keys: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """[N] positions sorted by key (equal keys keep their order), and [num_keys + 1] the start of each key."""
    return stable_sort(np.arange(len(keys), dtype=np.int64), keys, num_keys)


def stable_sort(values: Ints, keys: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """[N] values sorted by key (equal keys keep their order), and [num_keys + 1] the start of each key."""
    if jit.is_slow(len(keys)) or num_keys > 4 * len(keys) + 65536:
        return values[np.argsort(keys, kind="stable")], starts_of(np.bincount(keys, minlength=num_keys))
    sorted_values, starts = np.empty(len(keys), dtype=np.int64), np.zeros(num_keys + 1, dtype=np.int64)
    jit.call("counting_sort", sorted_values, starts, keys.astype(np.int64, copy=False), values, num=len(keys))
    return sorted_values, starts


def starts_of(counts: NDArray[Any]) -> Ints:
    """[num + 1] the start of each segment, from the segment lengths."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def chunk_starts(num: int, size: int) -> Ints:
    """Start of each chunk of `size`; the last may be shorter."""
    return np.append(np.arange(0, num, size, dtype=np.int64), num)


def segment_of(starts: Ints) -> Ints:
    """[N] the segment of each value."""
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))


def segment_sums(values: NDArray[Any], starts: Ints) -> NDArray[Any]:
    """The sum of each segment; 0 for an empty one."""
    total = np.zeros(len(values) + 1, dtype=np.float64 if values.dtype.kind == "f" else np.int64)
    np.cumsum(values, out=total[1:])
    return total[starts[1:]] - total[starts[:-1]]


def segment_maxima(values: NDArray[Any], starts: Ints) -> Ints:
    """The largest value of each segment; 0 for an empty one."""
    answer = np.zeros(len(starts) - 1, dtype=np.int64)
    is_full = starts[1:] > starts[:-1]
    if is_full.any():
        answer[is_full] = np.maximum.reduceat(values, starts[:-1][is_full])
    return answer


def take_segments(values: Ints, starts: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """The chosen segments, in that order, with their own starts."""
    counts = (starts[1:] - starts[:-1])[chosen]
    new_starts = starts_of(counts)
    if not jit.is_slow(len(values)):
        copied = np.empty(int(new_starts[-1]), dtype=np.int64)
        jit.call("copy_segments", copied, values, starts, chosen, num=len(values))
        return copied, new_starts
    places = np.arange(new_starts[-1], dtype=np.int64)
    places += np.repeat(starts[:-1][chosen] - new_starts[:-1], counts)
    return values[places], new_starts
