"""Randomness is a function of its key, the same on every machine and in every version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from truebatch.planning.keyed_rng import keyed_hash, keyed_order, keyed_shuffle

MASK = 2**64 - 1


def splitmix(value: int) -> int:
    """The published finaliser on Python integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def test_golden_values_never_change() -> None:
    assert keyed_hash(0, 0, "sample order", [0, 1, 2]).tolist() == [
        14814921701850734757,
        8721728501976370184,
        16043394428211842337,
    ]
    assert keyed_hash(7, 3, "dropout", [10**12, 2**63]).tolist() == [6267565727806070675, 1859882947719563449]
    assert keyed_order(10, 0, 0, "sample order").tolist() == [8, 7, 4, 1, 5, 9, 0, 3, 2, 6]


@given(st.integers(0, MASK), st.integers(0, 2**40), st.text(max_size=8), st.integers(0, MASK), st.integers(0, MASK))
def test_distinct_counters_have_distinct_bits(seed: int, epoch: int, purpose: str, one: int, other: int) -> None:
    bits = keyed_hash(seed, epoch, purpose, np.array([one, other], dtype=np.uint64))
    assert (bits[0] == bits[1]) == (one == other)


@given(st.integers(0, MASK), st.integers(0, 100), st.integers(0, MASK))
def test_seed_epoch_and_purpose_all_matter(seed: int, epoch: int, counter: int) -> None:
    counters = np.array([counter], dtype=np.uint64)
    bits = [keyed_hash(s, e, p, counters)[0] for s, e, p in (
        (seed, epoch, "a"), (seed ^ 1, epoch, "a"), (seed, epoch + 1, "a"), (seed, epoch, "b"),
    )]  # fmt: skip
    assert len(set(bits)) == 4


def test_differences_of_the_stream_are_those_of_splitmix() -> None:
    """counter -> finaliser(counter * stride + key): with the key found at counter 0, all others follow."""
    bits = keyed_hash(5, 6, "x", np.arange(1000))
    key = _unmix(int(bits[0]))
    assert bits.tolist() == [splitmix((key + i * 0x9E3779B97F4A7C15) & MASK) for i in range(1000)]


def _unmix(value: int) -> int:
    value ^= (value >> 31) ^ (value >> 62)
    value = (value * pow(0x94D049BB133111EB, -1, 2**64)) & MASK
    value ^= (value >> 27) ^ (value >> 54)
    value = (value * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & MASK
    return value ^ (value >> 30) ^ (value >> 60)


@given(st.integers(1, 300), st.integers(0, 50))
def test_an_order_is_a_permutation(num: int, seed: int) -> None:
    assert sorted(keyed_order(num, seed, 0, "x")) == list(range(num))


def test_a_shape_is_kept_and_counters_are_not_changed() -> None:
    counters = np.arange(6, dtype=np.uint64).reshape(2, 3)
    assert keyed_hash(0, 0, "x", counters).shape == (2, 3)
    assert counters.tolist() == [[0, 1, 2], [3, 4, 5]]


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 9), num=st.sampled_from([1, 2, 3, 9, 1000, 70_000]))
def test_a_shuffle_sorts_by_hash(monkeypatch: pytest.MonkeyPatch, seed: int, num: int) -> None:
    monkeypatch.setenv("TRUEBATCH_NUMBA", "1")
    ids = np.arange(num) * 3
    expected = ids[np.argsort(keyed_hash(seed, 0, "sort", ids))]
    assert keyed_shuffle(ids, seed, 0, "sort").tolist() == expected.tolist()


def test_permutations_look_random() -> None:
    """Every place sees every sample about as often as chance would have it (chi-squared, far tail)."""
    num, trials = 8, 4000
    table = np.zeros((num, num))
    for epoch in range(trials):
        table[np.arange(num), keyed_order(num, 0, epoch, "x")] += 1
    expected = trials / num
    assert ((table - expected) ** 2 / expected).sum() < 120  # 49 degrees of freedom: one in ten million
