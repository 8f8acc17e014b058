"""Means are of measurements alone; failures are counted beside them; two runs are compared pair by pair."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch_systems.vl_reward.eval.statistics import Row, compare, mean_interval, sign_flip_p, summarise


def rows_of(scores, category="物理"):
    return [Row(f"{category}{i}", category, "ok", float(score)) for i, score in enumerate(scores)]


def test_failures_are_in_no_figure_and_every_one_is_counted():
    scores = [float(i % 7) for i in range(14)]
    bad = ["parse_error"] * 3 + ["judge_failed"] * 2 + ["edit_failed"]
    rows = rows_of(scores) + [Row(f"bad{i}", "物理", status) for i, status in enumerate(bad)]
    found = summarise(rows)["overall"]
    assert found["mean"] == pytest.approx(statistics.fmean(scores))
    assert found["std"] == pytest.approx(statistics.stdev(scores))
    assert found["median"] == statistics.median(scores)
    assert (found["samples"], found["valid"]) == (20, 14)
    assert found["statuses"] == {"edit_failed": 1, "judge_failed": 2, "ok": 14, "parse_error": 3}
    assert summarise(rows)["failure_rate"] == pytest.approx(0.3)


@pytest.mark.parametrize(("bad", "samples"), [(3, 10), (7, 10), (1, 3), (29, 100)])
def test_the_rate_of_failures_is_the_very_number_that_people_write(bad, samples):
    rows = rows_of(range(samples - bad)) + [Row(f"bad{i}", "物理", "parse_error") for i in range(bad)]
    assert summarise(rows)["failure_rate"] == bad / samples


def test_the_micro_mean_weighs_samples_and_the_macro_mean_categories():
    found = summarise(rows_of([10, 10, 10], "a") + rows_of([0], "b") + [Row("x", "c", "parse_error")])
    assert (found["micro_mean"], found["macro_mean"]) == (7.5, 5.0)
    assert (found["best_category"], found["worst_category"]) == ("a", "b")
    assert found["categories"]["c"]["mean"] is None


def test_nothing_judged_gives_no_numbers():
    found = summarise([Row("x", "a", "edit_failed")])
    assert found["micro_mean"] is found["macro_mean"] is found["best_category"] is None
    assert found["failure_rate"] == 1.0


def test_pairs_are_made_by_id_and_the_counts_add_up():
    first = [*rows_of([1, 2, 3, 4]), Row("only first", "a", "ok", 9.0), Row("failed", "a", "parse_error")]
    second = [*list(reversed(rows_of([2, 2, 1, 8]))), Row("failed", "a", "ok", 1.0)]
    found = compare(first, second)
    assert (found.pairs, found.only_first, found.only_second) == (4, 1, 1)
    assert (found.improved, found.unchanged, found.regressed) == (2, 1, 1)
    assert found.improved + found.unchanged + found.regressed == found.pairs
    assert found.difference == pytest.approx((1 + 0 - 2 + 4) / 4)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_the_p_value_is_that_of_all_flips(gaps):
    values = np.array(gaps)
    means = [abs(np.mean([s * g for s, g in zip(signs, gaps, strict=True)])) for signs in
             itertools.product((1, -1), repeat=len(gaps))]  # fmt: skip
    expected = np.mean([mean >= abs(values.mean()) - 1e-12 for mean in means])
    assert sign_flip_p(values) == pytest.approx(expected)


def test_a_real_difference_is_seen_and_none_is_not():
    draw = np.random.default_rng(0)
    assert sign_flip_p(draw.normal(0.5, 1, 200)) < 0.01
    assert sign_flip_p(draw.normal(0.0, 1, 200)) > 0.05
    low, high = mean_interval(draw.normal(0.5, 1, 200))
    assert low < 0.5 < high
    assert mean_interval(np.arange(9.0)) == mean_interval(np.arange(9.0))
