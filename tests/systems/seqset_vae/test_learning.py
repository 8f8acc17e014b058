"""What the model learns where the truth is known: events of a set, and a planted risk. Minutes, so not by default."""

from __future__ import annotations

import pytest

from benchmarks.systems.seqset_quality import judge_clusters, learn_clusters, learn_risk


def check_clusters(found):
    assert found["reconstruction_left"] <= 0.5
    assert found["active_units"] >= 4
    assert found["gap_with_other_latents"] > 0.1
    assert found["largest_cosine_of_two_variables"] < 0.95
    assert found["variables_recovered"] >= 0.6


def check_planted(found):
    assert found["auroc"] >= 0.80
    assert found["auprc"] >= 2.5 * found["prevalence"]


def check_dealt(found):
    assert 0.45 <= found["auroc"] <= 0.55


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sets_are_learned_units_stay_active_and_variables_stay_apart():
    check_clusters(judge_clusters(*learn_clusters()))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_planted_risk_is_found(tmp_path):
    check_planted(learn_risk(tmp_path / "run", shuffled=False))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_labels_dealt_at_random_are_not_learned(tmp_path):
    check_dealt(learn_risk(tmp_path / "run", shuffled=True))
