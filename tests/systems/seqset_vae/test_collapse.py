"""The detector against posteriors whose truth is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.systems.seqset_quality import LIMIT, checks, known_posterior, truth_table
from truebatch_systems.seqset_vae.config import DetectorConfig
from truebatch_systems.seqset_vae.model.autoencoder import Posterior
from truebatch_systems.seqset_vae.train.collapse import Detector, count_grace_steps, judge, measure_signals

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
    judgement = judge(found, CONFIG)
    assert judgement.is_bad
    assert all(reason.startswith("in level 1 of 2") for reason in judgement.reasons)


def test_severity_rises_from_one_signal_to_the_alarm():
    assert [line["severity"] for line in checks(["prior"] * 3)] == ["orange", "orange", "red"]
    assert [line["severity"] for line in checks(["informative"])] == ["none"]


SETS, UNITS = 600, 32


def two_levels(shallow: tuple[float, float], deep: tuple[float, float], *, active: int = UNITS) -> Posterior:
    """Means that vary over sets by the first number of each level, variances of the second, in so many units of it."""
    varied = torch.randn(SETS, 2, UNITS, generator=torch.Generator().manual_seed(1))
    spread, variance = torch.zeros(2, UNITS), torch.ones(2, UNITS)
    for level, (by, of) in enumerate((shallow, deep)):
        spread[level, :active], variance[level, :active] = by, of
    return Posterior(varied * spread, variance.log().expand(SETS, -1, -1))


def story(*posteriors: Posterior, num_steps: int = 1000, warmup: int = 0, **config: Any) -> list[dict[str, Any]]:
    """The log of a run with these posteriors at checks that are evenly spread, the last one at its end."""
    settings = DetectorConfig(**config)
    grace = count_grace_steps(settings, num_steps=num_steps, warmup_steps=warmup)
    detector = Detector(config=settings, grace_steps=grace)
    steps = [num_steps * (k + 1) // len(posteriors) for k in range(len(posteriors))]
    return [
        detector.check(step, measure_signals(posterior, settings, logvar_limit=LIMIT), is_end=step == num_steps)
        for step, posterior in zip(steps, posteriors, strict=True)
    ]


DEAD = two_levels((0.001, 1.0), (0.001, 1.0))
HEALTHY = two_levels((1.0, 0.1), (1.0, 0.1))


def outcome(lines: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether anything was said in the course of the run, and how it ended."""
    return any("alarm" in line["events"] for line in lines[:-1]), lines[-1]["state"]


def test_1_dead_from_the_start_is_told_after_the_grace_and_at_the_end():
    assert outcome(story(*[DEAD] * 20)) == (True, "collapsed")


def test_2_dying_late_is_told_at_the_end_though_no_three_checks_are_left():
    lines = story(*[HEALTHY] * 19, DEAD)
    assert outcome(lines) == (False, "collapsed")
    assert lines[-1]["events"] == ["alarm"]


@pytest.mark.parametrize("level", [1, 2])
def test_3_one_dead_level_is_found_beside_a_healthy_one(level):
    one, other = (1.0, 0.1), (0.001, 1.0)
    lines = story(*[two_levels(*((one, other) if level == 2 else (other, one)))] * 20)
    assert outcome(lines) == (True, "collapsed")
    assert {reason.split(":")[0] for reason in lines[-1]["reasons"]} == {f"in level {level} of 2"}


def test_4_few_units_alive_are_told_and_a_fifth_of_them_are_enough():
    assert outcome(story(*[two_levels((1.0, 0.1), (1.0, 0.1), active=2)] * 20))[0]
    assert outcome(story(*[two_levels((1.0, 0.1), (1.0, 0.1), active=7)] * 20)) == (False, "healthy")


def test_5_a_slow_warm_up_that_ends_well_is_no_alarm():
    rising = [two_levels((by, 1 - by * by), (by, 1 - by * by)) for by in torch.linspace(0.001, 0.9, 20).tolist()]
    assert outcome(story(*rising)) == (False, "healthy")
    # Neither is one that does not move while beta rises.
    assert outcome(story(*[DEAD] * 8, *[HEALTHY] * 12, warmup=400)) == (False, "healthy")


def test_6_a_short_warm_up_is_no_alarm():
    assert outcome(story(*[DEAD] * 3, *[HEALTHY] * 17)) == (False, "healthy")


def test_7_a_small_kl_in_many_units_is_healthy():
    small = two_levels((0.15, 0.97), (0.15, 0.97))
    lines = story(*[small] * 20)
    assert max(lines[-1]["kl"]) < 0.5
    assert outcome(lines) == (False, "healthy")


def test_8_an_explosion_is_told_and_called_so():
    lines = story(*[HEALTHY] * 5, *[two_levels((1.0, 0.1), (30.0, 0.1))] * 15)
    assert outcome(lines) == (True, "exploding")
    assert "in level 2 of 2: a KL of 1.4" in lines[-1]["reasons"][0]
    broken = Posterior(torch.full((SETS, 2, UNITS), float("nan")), torch.zeros(SETS, 2, UNITS))
    assert story(broken)[-1]["state"] == "exploding"


def test_an_alarm_that_is_over_is_no_bad_end():
    lines = story(*[HEALTHY] * 5, *[DEAD] * 14, HEALTHY)
    assert lines[-1]["events"] == ["recovered"]
    assert outcome(lines) == (True, "healthy")


@pytest.mark.parametrize(("num_steps", "warmup", "grace"), [(1680, 5000, 840), (1000, 0, 100), (100_000, 313, 10_000)])
def test_the_grace_is_a_share_of_the_run_and_never_more_than_half(num_steps, warmup, grace):
    assert count_grace_steps(DetectorConfig(), num_steps=num_steps, warmup_steps=warmup) == grace
