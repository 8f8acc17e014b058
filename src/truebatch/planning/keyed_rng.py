"""Random numbers as a function of (seed, epoch, purpose, counter), not of a generator's state.

seed, epoch, purpose -> one 64-bit key;  key, counter -> 64 random-looking bits, different for different counters
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

from truebatch.planning.loops import jit
from truebatch.planning.rows import Ints

_ALL_BITS = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15  # odd, so counter * stride is a bijection of 64 bits
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK = 1 << 15  # counters mixed at a time, so the passes stay in the cache


def keyed_hash(seed: int, epoch: int, purpose: str, counters: ArrayLike) -> NDArray[np.uint64]:
    """[N] 64 bits per counter: the same on every machine and in every version, distinct for distinct counters."""
    key = np.uint64(_key(seed, epoch, purpose))
    bits = np.array(counters, dtype=np.uint64)
    flat = bits.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        _mix_in_place(flat[start : start + _BLOCK], key)
    return bits


def keyed_order(num: int, seed: int, epoch: int, purpose: str) -> Ints:
    """[num] a permutation of 0..num-1: the counters in the order of their hashes."""
    return keyed_shuffle(np.arange(num, dtype=np.int64), seed, epoch, purpose)


def keyed_shuffle(ids: Ints, seed: int, epoch: int, purpose: str, *, values: Ints | None = None) -> Ints:
    """Distinct ids in the order of their hashes: the order of two never depends on a third.

    If `values` has one value per id, those are sorted instead, in place.
    """
    bits = keyed_hash(seed, epoch, purpose, ids)
    values = ids.copy() if values is None else values
    if jit.is_slow(len(ids)):
        return values[np.argsort(bits)]
    bits ^= np.uint64(1 << 63)  # signed integers in the same order: mixing signed and unsigned would give floats
    num_bits = max(1, len(ids).bit_length() - 1)
    coarse = max(1, min(11, num_bits - 2))
    counts = np.zeros((1 << coarse) + 1, dtype=np.int64)
    fine = np.zeros((1 << max(0, num_bits - coarse)) + 1, dtype=np.int64)
    some_keys, some_values = (np.empty(len(ids), dtype=np.int64) for _ in range(2))
    jit.call("bucket_order", values, bits.view(np.int64), counts, fine, some_keys, some_values, coarse, num=len(ids))
    return values


def _key(seed: int, epoch: int, purpose: str) -> int:
    word = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
    key = _mix(seed & _ALL_BITS)
    key = _mix(key ^ _mix((epoch + _STRIDE) & _ALL_BITS))
    return _mix(key ^ word)


def _mix(value: int) -> int:
    """The splitmix64 finaliser, a bijection of 64 bits."""
    value = ((value ^ (value >> 30)) * _FIRST) & _ALL_BITS
    value = ((value ^ (value >> 27)) * _SECOND) & _ALL_BITS
    return value ^ (value >> 31)


def _mix_in_place(bits: NDArray[np.uint64], key: np.uint64) -> None:
    bits *= np.uint64(_STRIDE)
    bits += key
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_FIRST)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_SECOND)
    bits ^= bits >> np.uint64(31)
