"""The detector against posteriors whose truth is known."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.systems.seqset_quality import LIMIT, checks, known_posterior, truth_table
from truebatch_systems.seqset_vae.config import DetectorConfig
from truebatch_systems.seqset_vae.model.autoencoder import Posterior
from truebatch_systems.seqset_vae.train.collapse import Detector, judge, measure_signals

CONFIG = DetectorConfig(enter=3, leave=2)


def test_the_truth_table_is_right_in_all_six():
    assert list(truth_table().values()) == [True] * 6


def test_a_posterior_that_is_the_prior_is_a_collapse_after_as_many_checks_as_set():
    found = checks(["prior"] * 4)
    assert [line["alarmed"] for line in found] == [False, False, True, True]
    assert found[2]["events"] == ["alarm"]
    assert found[2]["state"] == "collapsed"


def test_a_sharp_posterior_that_tells_sets_apart_is_healthy():
    found = checks(["informative"] * 6)
    assert {line["state"] for line in found} == {"healthy"}
    assert not any(line["alarmed"] or line["too_sharp"] for line in found)


def test_a_high_kl_that_is_the_same_for_every_set_is_a_collapse():
    found = checks(["constant"] * 3)
    assert sum(found[0]["kl"]) > 100
    assert sum(found[0]["information"]) == pytest.approx(0, abs=1e-6)
    assert found[-1]["state"] == "uninformative"
    assert found[-1]["alarmed"]


def test_a_variance_on_its_clamp_is_too_sharp_and_never_a_collapse():
    found = checks(["at the clamp"] * 5)
    assert [line["events"] for line in found] == [["too sharp"], [], [], [], []]
    assert not any(line["alarmed"] for line in found)


def test_nothing_alarms_while_beta_is_rising():
    found = checks(["prior"] * 6, grace=60)
    assert not any(line["alarmed"] or line["events"] for line in found)
    assert all(line["grace"] for line in found)
    assert [line["alarmed"] for line in checks(["prior"] * 6, grace=30)] == [False] * 5 + [True]


def test_a_recovery_is_noted_after_as_many_good_checks_as_set():
    found = checks(["prior"] * 3 + ["informative"] * 3)
    assert [line["alarmed"] for line in found] == [False, False, True, True, False, False]
    assert found[4]["events"] == ["recovered"]


def test_one_good_check_begins_the_count_anew():
    found = checks(["prior", "prior", "informative", "prior", "prior", "informative"])
    assert not any(line["alarmed"] for line in found)


def test_a_decoder_that_does_not_use_the_latents_is_a_collapse():
    assert checks(["informative"] * 3, gap=0.0)[-1]["alarmed"]
    assert not checks(["informative"] * 3, gap=0.5)[-1]["alarmed"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["prior", "informative", "constant", "at the clamp"]), max_size=10), st.integers(0, 10))
def test_a_detector_that_was_saved_goes_on_as_if_nothing_had_happened(kinds, cut):
    whole = checks(kinds, grace=20)
    first = Detector(config=CONFIG, grace_steps=20)
    lines = []
    for k, kind in enumerate(kinds):
        if k == cut:
            again = Detector(config=CONFIG, grace_steps=20, bad_in_row=99, is_alarmed=True)
            again.restore(json.loads(json.dumps(first.state())))
            first = again
        lines.append(first.check(10 * (k + 1), measure_signals(known_posterior(kind), CONFIG, logvar_limit=LIMIT)))
    assert lines == whole


def test_active_units_and_collapsed_dimensions_are_counted_by_level():
    mean = torch.zeros(600, 2, 8)
    mean[:, 1, :3] = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    logvar = torch.zeros(600, 2, 8)
    logvar[:, 1, :3] = -2
    found = measure_signals(Posterior(mean, logvar), CONFIG, logvar_limit=LIMIT)
    assert (found.active, found.collapsed) == ((0, 3), (8, 5))
    assert not judge(found, CONFIG).is_bad


def test_severity_rises_from_one_signal_to_the_alarm():
    assert [line["severity"] for line in checks(["prior"] * 3)] == ["orange", "orange", "red"]
    assert [line["severity"] for line in checks(["informative"])] == ["none"]
