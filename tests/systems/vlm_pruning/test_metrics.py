from __future__ import annotations

import math

import pytest

from truebatch_systems.vlm_pruning.eval.metrics import (
    Answered,
    confidence_interval,
    lost_points,
    mode_figures,
    search_score,
    smoothed_score,
    token_figures,
)
from truebatch_systems.vlm_pruning.eval.scorers import JUDGES, Judged


@pytest.mark.parametrize(
    ("mean", "number", "low", "high"),
    [(0.5, 100, 0.4038, 0.5962), (1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775), (0.9, 480, 0.8700, 0.9237)],
)
def test_the_interval_is_the_one_of_wilson(mean, number, low, high):
    assert confidence_interval(mean, number) == pytest.approx((low, high), abs=1e-4)


def test_nothing_is_known_without_samples():
    assert confidence_interval(0.0, 0) == (0.0, 1.0)
    assert token_figures([]) == {}


def test_figures_are_flat_means_and_say_what_each_layer_saw():
    judged = [Judged({"category": c}, "", s) for c, s in (("a", 1.0), ("a", 0.0), ("b", 1.0))]
    answered = [Answered("", (16, 16, 4, 4)), Answered("", (16, 16, 2, 2)), Answered("", (16, 16, 6, 0))]
    figures = mode_figures(JUDGES["exact"], judged, answered)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["by_category"] == {"a": 0.5, "b": 1.0}
    assert figures["tokens_per_layer"] == {"0": 16, "1": 16, "2": 4, "3": 2}
    assert figures["average_tokens"] == pytest.approx((16 + 16 + 4 + 2) / 4)
    assert figures["final_tokens"] == 2
    assert figures["vision_tokens_mean"] == figures["vision_tokens_max"] == figures["vision_tokens_min"] == 16


def test_lost_points_are_counted_from_the_unpruned_model():
    figures = {"origin": {"accuracy": 0.95}, "hard": {"accuracy": 0.92}, "soft": {"accuracy": 0.96}}
    assert lost_points(figures) == pytest.approx({"hard": 3.0, "soft": -1.0})
    assert lost_points({"hard": {"accuracy": 1.0}}) == {}


@pytest.mark.parametrize(
    ("origin", "hard", "kept", "score"),
    [
        (0.9, 0.9, 0.3, -0.03),
        (0.9, 0.8, 0.3, -(0.1 * (1 + 50 * 0.1) + 0.03)),
        (0.8, 0.9, 0.3, 0.1 - 0.03),
        (0.9, 0.9, 0.05, -0.5),
        (0.9, 0.9, 0.8, -2.0),
        (0.9, 0.9, 0.1, -0.01),
        (0.9, 0.9, 0.6, -0.06),
    ],
)
def test_the_search_score_punishes_lost_accuracy_and_shares_that_are_not_wanted(origin, hard, kept, score):
    figures = {"origin": {"accuracy": origin}, "hard": {"accuracy": hard, "average_keep_ratio": kept}}
    assert search_score(figures) == pytest.approx(score)


def test_a_search_without_both_modes_has_no_score_and_later_scores_count_more():
    assert search_score({"hard": {"accuracy": 0.9}}) == -math.inf
    assert smoothed_score([]) == smoothed_score([-math.inf]) == -math.inf
    assert smoothed_score([-1.0]) == -1.0
    assert smoothed_score([-1.0, 0.0, 0.0]) == pytest.approx(-0.49)
