"""The loops give the same plan compiled and interpreted, and do what a slow and obvious version does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planning.reference import best_fit, length_lists, patches_for, plan_configs, same_step
from truebatch.planning.config import PlanConfig
from truebatch.planning.loops import jit, registry
from truebatch.planning.pack_epoch import _levels
from truebatch.planning.plan import build_plan
from truebatch.testing.length_distributions import example_lengths


def both_speeds(patch: pytest.MonkeyPatch, lengths: np.ndarray, config: PlanConfig, ranks: int) -> None:
    plans = []
    for wish in ("0", "1"):
        patch.setenv("TRUEBATCH_NUMBA", wish)
        assert jit.is_slow(len(lengths)) == (wish == "0")
        plans.append(build_plan(lengths, config, ranks=ranks, costs=patches_for(lengths, config)))
    slow, fast = plans
    assert slow.num_steps == fast.num_steps
    assert all(same_step(slow.step(s), fast.step(s)) for s in range(slow.num_steps))


@given(lengths=length_lists(), config=plan_configs(), ranks=st.integers(1, 9))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numba_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, lengths: np.ndarray, config: PlanConfig, ranks: int
) -> None:
    pytest.importorskip("numba")
    both_speeds(monkeypatch, lengths, config, ranks)


@pytest.mark.parametrize("config", [
    PlanConfig(layout="packed", cells=8192, rows_per_step=16),
    PlanConfig(layout="packed", cells=8192, pairs=7 * 10**7, samples=40, samples_per_step=500),
    PlanConfig(layout="packed", cells=16384, row_cells=8192, pairs=7 * 10**7, samples=60, rows_per_step=16),
    PlanConfig(cells=16384, micro_batches_per_step=16),
    PlanConfig(cells=16384, samples=64, samples_per_step=500),
])  # fmt: skip
def test_numba_changes_nothing_on_real_lengths(monkeypatch: pytest.MonkeyPatch, config: PlanConfig) -> None:
    pytest.importorskip("numba")
    both_speeds(monkeypatch, example_lengths("patient", 4000), config, 8)


def rows_of_kernel(lengths: list[int], capacity: int) -> list[list[int]]:
    bases, num_words = _levels(capacity)
    row_of = [0] * len(lengths)
    num = registry.KERNELS["best_fit"].loop(
        row_of,
        [-1] * (capacity + 1),
        [-1] * len(lengths),
        [0] * num_words,
        [],
        bases.tolist(),
        lengths,
        [],
        [],
        capacity,
    )
    return [[i for i, row in enumerate(row_of) if row == r] for r in range(num)]


@given(
    st.integers(1, 3000).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=80)))
)
@settings(deadline=None, max_examples=200)
def test_best_fit_is_the_obvious_best_fit(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    assert rows_of_kernel(lengths, capacity) == best_fit(lengths, capacity)


@given(st.lists(st.integers(0, 5000), max_size=60), st.lists(st.integers(0, 5000), max_size=60))
def test_the_table_of_free_spaces_finds_the_next_one(put: list[int], asked: list[int]) -> None:
    bases, num_words = _levels(5000)
    bits, kept = [0] * num_words, set[int]()
    loops = {part.__name__: part for part in registry.PARTS}
    for value in put:
        if value in kept:
            loops["remove_free"](bits, bases.tolist(), value)
            kept.remove(value)
        else:
            loops["add_free"](bits, bases.tolist(), value)
            kept.add(value)
    for value in asked:
        assert loops["find_free"](bits, bases.tolist(), value) == min((k for k in kept if k >= value), default=-1)


@pytest.mark.parametrize("place", range(32))
def test_the_lowest_bit_is_found(place: int) -> None:
    loops = {part.__name__: part for part in registry.PARTS}
    assert loops["lowest"](1 << place) == place
    assert loops["lowest"](((1 << 32) - 1) & ~((1 << place) - 1)) == place


def greedy_groups(lengths: list[int], cells: int) -> int:
    """How few runs of neighbours keep rows times the widest within the limit."""
    groups, start = 1, 0
    for i in range(len(lengths)):
        if (i - start + 1) * max(lengths[start : i + 1]) > cells:
            groups, start = groups + 1, i
    return groups


@given(length_lists(), st.integers(40, 200), st.integers(1, 6))
@settings(deadline=None, max_examples=150)
def test_a_padded_step_has_no_more_micro_batches_than_sorted_neighbours_need(
    lengths: np.ndarray, cells: int, ranks: int
) -> None:
    plan = build_plan(lengths, PlanConfig(cells=cells, samples_per_step=len(lengths)), ranks=ranks)
    need = greedy_groups(sorted(lengths.tolist(), reverse=True), cells)
    assert plan.statistics.micro_batches == ranks * -(-need // ranks)


@given(length_lists(), st.integers(40, 200), st.integers(1, 6))
@settings(deadline=None, max_examples=150)
def test_a_packed_step_has_few_micro_batches(lengths: np.ndarray, cells: int, ranks: int) -> None:
    """Any decreasing fit needs less than twice the bound; a share of one more per rank may be lost to the ranks."""
    plan = build_plan(lengths, PlanConfig(layout="packed", cells=cells, samples_per_step=len(lengths)), ranks=ranks)
    said = plan.statistics
    assert said.micro_batches_at_least <= said.micro_batches <= 2 * said.micro_batches_at_least


def test_a_numba_that_cannot_be_imported_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        raise ImportError("Numba needs another NumPy")

    monkeypatch.setenv("TRUEBATCH_NUMBA", "1")
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(jit.importlib, "import_module", refuse)
    jit._load_numba.cache_clear()
    try:
        assert jit.is_slow(10**6)
        assert "Numba needs another NumPy" in caplog.text
    finally:
        jit._load_numba.cache_clear()


def test_small_plans_do_not_wait_for_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUEBATCH_NUMBA", raising=False)
    assert jit.is_slow(100)
