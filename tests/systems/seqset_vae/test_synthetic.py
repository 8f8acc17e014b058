"""The embedded stays: seeded, shaped as the literature says, with a risk that is there or, in the control, is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from truebatch_systems.seqset_vae.config import GeneratorConfig
from truebatch_systems.seqset_vae.data.synthetic import generate_stays
from truebatch_systems.seqset_vae.data.variables import normalise

CONFIG = GeneratorConfig(stays=400)


@pytest.fixture(scope="module")
def made():
    return generate_stays(CONFIG, width=512)


def test_stays_have_the_shape_of_intensive_care(made):
    stays, variables = made
    assert 35 <= np.median(stays.num_sets) <= 55
    assert 120 <= np.percentile(stays.num_sets, 95) <= 220
    assert stays.num_sets.max() <= 600
    assert 5.5 <= stays.set_size.mean() <= 7.5
    assert stays.set_size.min() == 1
    assert len(variables) == 132
    assert stays.labels.sum() == 40
    vectors = variables.vectors[1:] / np.linalg.norm(variables.vectors[1:], axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    assert cosines[~np.eye(len(vectors), dtype=bool)].mean() == pytest.approx(0.6, abs=0.05)
    scaled = normalise(stays, variables).val
    assert abs(scaled.mean()) < 0.1
    assert 1.0 < scaled.std() < 1.6
    assert 0.01 < (np.abs(scaled) > 4.5).mean() < 0.03


def test_a_stay_depends_on_the_seed_and_its_own_number_only(made):
    stays, _ = made
    few, _ = generate_stays(replace(CONFIG, stays=20), width=8)
    for i in range(20):
        for name in ("var", "val", "set_minute"):
            np.testing.assert_array_equal(few[i][name], stays[i][name])
    other, _ = generate_stays(replace(CONFIG, stays=20, seed=1), width=8)
    assert not np.array_equal(other.var[:50], few.var[:50])


def test_every_set_is_sorted_in_time_and_holds_a_variable_once(made):
    stays, _ = made
    for i in range(0, len(stays), 20):
        sample = stays[i]
        assert (np.diff(sample["set_minute"]) > 0).all()
        assert len(np.unique(np.stack([sample["set_id"], sample["var"]]), axis=1).T) == len(sample["var"])


def last_values(stays, variables):
    scaled = normalise(stays, variables)
    table = np.zeros((len(stays), len(variables)))
    for i in range(len(stays)):
        table[i, scaled[i]["var"]] = np.clip(scaled[i]["val"], -4, 4)
    return table


def test_the_risk_is_in_the_events_and_not_in_the_control(made):
    linear_model = pytest.importorskip("sklearn.linear_model")
    metrics = pytest.importorskip("sklearn.metrics")
    stays, variables = made
    table, half = last_values(stays, variables), np.arange(len(stays)) % 2 == 0
    control = generate_stays(replace(CONFIG, shuffled=True), width=8)[0].labels
    found = []
    for labels in (stays.labels, control):
        fitted = linear_model.LogisticRegression(C=0.01, max_iter=500).fit(table[half], labels[half])
        found.append(metrics.roc_auc_score(labels[~half], fitted.predict_proba(table[~half])[:, 1]))
    assert found[0] > 0.85
    assert 0.3 < found[1] < 0.7
    assert control.sum() == stays.labels.sum()


def test_stays_of_one_length_and_a_coin_for_a_label():
    stays, _ = generate_stays(GeneratorConfig(stays=30, fixed_hours=48.0, signal=0.0, positives=0.2), width=4)
    assert stays.set_minute.max() <= 48 * 60
    assert np.median([stays[i]["set_minute"][-1] for i in range(30)]) > 40 * 60
    assert stays.labels.sum() == 6
