"""A lower budget splits micro-batches and changes nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.reference import held, length_lists, patches_for, plan_configs
from truebatch.errors import PlanError
from truebatch.planning.config import MicroBatchLimits, PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Rows, packed_row, padded_rows
from truebatch.planning.split_rows import halve_rows, split_rows


def all_rows(lengths: np.ndarray, config: PlanConfig) -> list[Rows]:
    plan = build_plan(lengths, config, ranks=2, costs=patches_for(lengths, config))
    return [rows for s in range(plan.num_steps) for rank in plan.step(s) for rows in rank]


@given(
    length_lists(),
    plan_configs(),
    st.integers(40, 120),
    st.none() | st.integers(1600, 4000),
    st.none() | st.integers(1, 4),
)
@settings(deadline=None, max_examples=120)
def test_split_micro_batches_hold_the_same_samples_in_order_and_keep_the_new_limits(
    lengths: np.ndarray, config: PlanConfig, cells: int, pairs: int | None, samples: int | None
) -> None:
    limits = MicroBatchLimits(cells=cells, pairs=pairs, samples=samples, costs={"patches": 9} if config.costs else {})
    costs = patches_for(lengths, config)
    asked = {"cells": cells, "pairs": pairs, "samples": samples, **limits.costs}
    for rows in all_rows(lengths, config):
        parts = split_rows(rows, lengths, limits, costs=costs)
        assert np.concatenate([part.ids for part in parts]).tolist() == rows.ids.tolist()
        for part in parts:
            taken = held(part, lengths, costs)
            assert all(limit is None or taken[name] <= limit for name, limit in asked.items())
            assert part.layout == rows.layout
        before = held(rows, lengths, costs)
        if all(limit is None or before[name] <= limit for name, limit in asked.items()):
            assert parts == [rows]


@given(length_lists(), plan_configs())
@settings(deadline=None, max_examples=60)
def test_halves_hold_the_same_samples_in_order(lengths: np.ndarray, config: PlanConfig) -> None:
    for rows in all_rows(lengths, config):
        halves = halve_rows(rows, lengths)
        assert np.concatenate([half.ids for half in halves]).tolist() == rows.ids.tolist()
        assert len(halves) == (2 if rows.num_samples > 1 else 1)
        assert all(half.num_samples < rows.num_samples for half in halves) or rows.num_samples < 2


def test_halves_are_about_equal() -> None:
    lengths = np.array([10, 10, 10, 10, 40])
    packed = halve_rows(packed_row(np.arange(5), 80), lengths)
    assert [half.cells for half in packed] == [40, 40]
    padded = halve_rows(padded_rows(np.arange(4), 10), lengths)
    assert [half.num_rows for half in padded] == [2, 2]


def test_fixed_rows_stay_whole_where_they_fit_and_shrink_where_they_do_not() -> None:
    lengths = np.array([6, 4, 5, 5])
    rows = Rows(np.arange(4), np.array([0, 2, 4]), 12, "packed")
    assert [part.cells for part in split_rows(rows, lengths, MicroBatchLimits(cells=12))] == [12, 12]
    assert [part.cells for part in split_rows(rows, lengths, MicroBatchLimits(cells=10))] == [10, 10]
    assert [part.cells for part in split_rows(rows, lengths, MicroBatchLimits(cells=6))] == [6, 4, 5, 5]


def test_a_sample_that_no_split_can_fit_is_named() -> None:
    with pytest.raises(PlanError, match="exceeds the limit by itself") as caught:
        split_rows(padded_rows(np.array([3, 8]), 9), np.arange(1, 11), MicroBatchLimits(cells=8))
    assert "sample 8 has 9 tokens" in caught.value.seen


def test_an_empty_micro_batch_stays_empty() -> None:
    empty = padded_rows(np.array([], dtype=np.int64), 0)
    assert split_rows(empty, np.array([1]), MicroBatchLimits(cells=1)) == [empty]
    assert halve_rows(empty, np.array([1])) == [empty]
