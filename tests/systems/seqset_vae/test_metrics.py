"""The figures are those of scikit-learn, ties included, and their intervals hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import DataError
from truebatch_systems.seqset_vae.eval.metrics import (
    auprc,
    auroc,
    brier,
    calibration,
    confidence,
    expected_calibration_error,
    paired_difference,
    summarise,
)


@st.composite
def judged(draw):
    number = draw(st.integers(2, 40))
    labels = np.array(draw(st.lists(st.integers(0, 1), min_size=number, max_size=number)))
    labels[:2] = [0, 1]
    # Few distinct scores, so that most are tied.
    scores = np.array(draw(st.lists(st.integers(0, 8), min_size=number, max_size=number))) / 8
    return labels, scores


@settings(deadline=None, max_examples=100)
@given(judged())
def test_the_figures_are_those_of_scikit_learn(pair):
    sklearn = pytest.importorskip("sklearn.metrics")
    labels, scores = pair
    assert auroc(labels, scores) == pytest.approx(sklearn.roc_auc_score(labels, scores), abs=1e-12)
    assert auprc(labels, scores) == pytest.approx(sklearn.average_precision_score(labels, scores), abs=1e-12)
    assert brier(labels, scores) == pytest.approx(sklearn.brier_score_loss(labels, scores), abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(judged(), st.randoms())
def test_no_figure_depends_on_the_order_of_the_stays(pair, random):
    labels, scores = pair
    order = list(range(len(labels)))
    random.shuffle(order)
    for metric in (auroc, auprc, brier, expected_calibration_error):
        assert metric(labels[order], scores[order]) == pytest.approx(metric(labels, scores), abs=1e-12)


def test_calibration_is_counted_by_tenths():
    labels = np.array([0, 1, 1, 0])
    scores = np.array([0.05, 0.05, 1.0, 0.95])
    rows = calibration(labels, scores)
    assert [(row["from"], row["stays"], row["share_positive"]) for row in rows] == [(0.0, 2, 0.5), (0.9, 2, 0.5)]
    assert expected_calibration_error(labels, scores) == pytest.approx((0.45 + 0.475) / 2)
    distances = [row["stays"] * abs(row["mean_probability"] - row["share_positive"]) for row in rows]
    assert expected_calibration_error(labels, scores) == pytest.approx(sum(distances) / len(labels))


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    truth = 0.7602  # AUROC of two normal distributions one deviation apart: the normal distribution at 1 / sqrt(2)
    held = 0
    for k in range(60):
        labels = np.repeat([0, 1], [80, 40])
        found = confidence(auroc, labels, rng.normal(labels, 1.0), draws=120, seed=k)
        held += found.low <= truth <= found.high
    assert 50 <= held <= 60


def test_intervals_are_the_same_for_the_same_seed_and_pairs_are_compared_on_the_same_patients():
    rng = np.random.default_rng(1)
    labels = np.repeat([0, 1], 50)
    good = rng.normal(labels, 1.0)
    assert confidence(auroc, labels, good, draws=50) == confidence(auroc, labels, good, draws=50)
    assert paired_difference(auroc, labels, good, good, draws=50).as_dict() == {"value": 0.0, "low": 0.0, "high": 0.0}
    better = paired_difference(auroc, labels, good, rng.random(100), draws=200)
    assert better.low > 0


def test_a_summary_leaves_out_and_counts_what_has_no_label():
    figures = summarise(np.array([0, 1, -1, 1]), np.array([0.1, 0.9, 0.5, 0.8], dtype=np.float32), draws=20)
    assert (figures["stays"], figures["unlabelled"], figures["positives"]) == (3, 1, 2)
    assert (figures["auroc"], figures["auroc_interval"]) == (1.0, [1.0, 1.0])


def test_one_class_or_a_number_that_is_no_probability_is_refused():
    with pytest.raises(DataError, match=r"both classes\n  seen: 2 labelled stays, classes \[0\]"):
        summarise(np.array([0, 0]), np.array([0.1, 0.2]))
    with pytest.raises(DataError, match=r"not between 0 and 1\n  seen: np.float64\(nan\) at place 1"):
        summarise(np.array([0, 1]), np.array([0.1, np.nan]))
