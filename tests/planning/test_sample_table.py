"""Bad numbers are refused before planning, in three parts, with the value and the sample."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from truebatch.errors import PlanError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan


@pytest.mark.parametrize(("lengths", "wrong", "seen", "do"), [
    ([], "there are no samples", "0 lengths", "at least one"),
    ([5, 0, 3, 0], "2 of 4 lengths are not at least 1", "sample 1 has length 0", "drop such samples"),
    ([5, 3, -7], "1 of 3 lengths are not at least 1", "sample 2 has length -7", "fix the function"),
    ([5.0, float("nan")], "must be integers", "sample 1 has", "integers"),
    ([5.0, float("inf")], "must be integers", "sample 1 has", "integers"),
    ([5.5, 3.0], "must be integers", "sample 0 has", "integers"),
    (np.array([5.0, 3.0]), "must be integers", "float64", r"astype\(np.int64\)"),
    ([True, False], "must be integers", "bool", "True and False"),
    (["5", "6"], "must be integers", "sample 0 has", "integers"),
    ([5, None], "must be integers", "sample 1 has None", "integers"),
    ([5, 2**70], "must be integers", "sample 1 has 1180591620717411303424", "integers"),
    ([5, 2**63], "must be integers", "sample 1 has", "integers"),
    (np.array([5, 2**63], np.uint64), "not at most", "sample 1 has length 9223372036854775808", "fix the function"),
    ([5, 2**30], "not at most", "sample 1 has length 1073741824", "fix the function"),
    ([[1, 2], [3, 4]], "must be flat", r"shape \(2, 2\)", "one dimension"),
    ([[1, 2], [3]], "cannot be read", "inhomogeneous", "one flat list"),
    (7, "must be flat", r"shape \(\)", "one dimension"),
])  # fmt: skip
def test_lengths_that_are_not_lengths_are_refused(lengths: Any, wrong: str, seen: str, do: str) -> None:
    with pytest.raises(PlanError, match=wrong) as caught:
        build_plan(lengths, PlanConfig(cells=50))
    assert _matches(seen, caught.value.seen)
    assert _matches(do, caught.value.do)


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


@pytest.mark.parametrize("ranks", [0, -1, 1.0, True, "2", None])
def test_a_number_of_ranks_below_one_is_refused(ranks: Any) -> None:
    with pytest.raises(PlanError, match="ranks must be a whole number of at least 1"):
        build_plan([1, 2], PlanConfig(cells=50), ranks=ranks)


def test_an_epoch_below_zero_is_refused() -> None:
    with pytest.raises(PlanError, match="epoch must be a whole number of at least 0"):
        build_plan([1, 2], PlanConfig(cells=50), epoch=-1)


@pytest.mark.parametrize(("column", "wrong"), [
    ([1, 2], "does not have one value per sample"),
    ([1, 2, -1], "must be from 0"),
    ([1.0, 2.0, 3.0], "must be integers"),
    ([True, True, False], "must be integers"),
    ([[1], [2], [3]], "must be flat"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["cost", "count"])
def test_costs_and_counts_are_checked_like_lengths(kind: str, column: Any, wrong: str) -> None:
    config = PlanConfig(cells=50, costs={"x": 9} if kind == "cost" else {})
    with pytest.raises(PlanError, match=wrong):
        build_plan([1, 2, 3], config, **{f"{kind}s": {"x": column}})


def test_costs_without_a_limit_and_limits_without_costs_are_refused() -> None:
    with pytest.raises(PlanError, match="different names"):
        build_plan([1, 2], PlanConfig(cells=50), costs={"patches": [1, 2]})
    with pytest.raises(PlanError, match="different names"):
        build_plan([1, 2], PlanConfig(cells=50, costs={"patches": 9}))


@pytest.mark.parametrize("config", [
    PlanConfig(cells=9), PlanConfig(pairs=99), PlanConfig(tokens_per_step=9),
    PlanConfig(layout="packed", cells=99, row_cells=9, rows_per_step=1),
])  # fmt: skip
def test_a_sample_over_any_limit_on_its_own_is_named(config: PlanConfig) -> None:
    with pytest.raises(PlanError, match="1 of 3 samples exceed a limit") as caught:
        build_plan([1, 10, 2], config)
    assert "sample 1 has 10 tokens" in caught.value.seen


def test_a_cost_over_its_limit_can_be_dropped_but_not_cut() -> None:
    lengths, patches = [5, 5, 5], {"patches": [1, 30, 2]}
    for overlong in ("refuse", "cut"):
        with pytest.raises(PlanError, match="1 of 3 samples") as caught:
            build_plan(lengths, PlanConfig(costs={"patches": 9}, overlong=overlong), costs=patches)
        assert "patches=30" in caught.value.seen
        assert "cannot be cut" in caught.value.do
    plan = build_plan(lengths, PlanConfig(costs={"patches": 9}, overlong="drop"), costs=patches)
    assert plan.samples.dropped_ids.tolist() == [1]


def test_dropping_everything_is_an_error_not_an_empty_plan() -> None:
    with pytest.raises(PlanError, match="none is left to plan"):
        build_plan([50, 60], PlanConfig(cells=9, overlong="drop"))


def test_counts_measured_before_a_cut_are_refused() -> None:
    with pytest.raises(PlanError, match="counts of a step would be wrong"):
        build_plan([5, 60], PlanConfig(cells=9, overlong="cut"), counts={"tokens": [5, 60]})
