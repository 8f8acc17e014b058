"""Stays are shortened by whole sets, and the recent ones are kept; compared with a slow cutter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.systems.seqset_vae.drawn import sets_of, stays
from truebatch.errors import ConfigError
from truebatch_systems.seqset_vae.data.admissions import NOTHING, make_stays
from truebatch_systems.seqset_vae.data.transform import cut_stays

NONE = [(0.0, [(NOTHING, 0.0)])]


def cut_slowly(sets: list[Any], *, first_hours=None, last_hours=None, max_sets=None, max_events=None) -> list[Any]:
    if first_hours is not None:
        sets = [one for one in sets if one[0] < first_hours * 60] or NONE
    if last_hours is not None:
        sets = [one for one in sets if one[0] > sets[-1][0] - last_hours * 60]
    if max_sets is not None:
        sets = sets[-max_sets:]
    while max_events is not None and sum(len(events) for _, events in sets) > max_events:
        sets = sets[1:]
    return sets


@settings(deadline=None, max_examples=80)
@given(
    stays(),
    st.fixed_dictionaries(
        {},
        optional={
            "first_hours": st.sampled_from([0.5, 1, 3]),
            "last_hours": st.sampled_from([0.5, 1, 3]),
            "max_sets": st.integers(1, 4),
            "max_events": st.integers(5, 12),
        },
    ),
)
def test_cutting_keeps_the_sets_a_slow_cutter_keeps(made, limits):
    cut, lines = cut_stays(made, **limits)
    assert cut.ids == made.ids
    shorter = 0
    for i in range(len(made)):
        assert sets_of(cut[i]) == cut_slowly(sets_of(made[i]), **limits)
        shorter += sets_of(cut[i]) != sets_of(made[i])
    assert bool(lines) == bool(shorter)


def test_what_was_cut_is_said():
    sample = {"id": "a", "label": 0, "var": [1, 2, 3, 1], "val": [1] * 4, "set_minute": [0, 60], "set_size": [3, 1]}
    cut, lines = cut_stays(make_stays([sample]), max_events=3)
    assert lines == ["max_events=3: 1 of 1 stays shortened by 1 sets (3 events)"]
    assert sets_of(cut[0]) == [(60.0, [(1, 1.0)])]


def test_a_set_larger_than_the_limit_is_refused_and_not_cut():
    sample = {"id": "a", "label": 0, "var": [1, 2, 3], "val": [1, 1, 1], "set_minute": [0], "set_size": [3]}
    with pytest.raises(ConfigError, match=r"stay 'a' has a last set larger than max_events.*\n.*3 events.*\n.*least 3"):
        cut_stays(make_stays([sample]), max_events=2)
