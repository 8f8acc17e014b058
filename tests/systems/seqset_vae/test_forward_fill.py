"""Values carried forward, compared with a loop over sets that remembers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.systems.seqset_vae.drawn import sets_of, stays
from truebatch.errors import ConfigError
from truebatch_systems.seqset_vae.data.admissions import NOTHING, make_stays
from truebatch_systems.seqset_vae.data.transform import carry_forward, carry_stay, numbers_of
from truebatch_systems.seqset_vae.data.variables import name_variables


def carried_slowly(sets: list[Any], minutes: float, always: set[int]) -> list[Any]:
    known: dict[int, tuple[float, float]] = {}
    out = []
    for minute, events in sets:
        known |= {v: (x, minute) for v, x in events}
        kept = {v: x for v, (x, seen) in known.items() if minute - seen <= minutes or v in always}
        out.append((minute, sorted(kept.items())))
    return out


@settings(deadline=None, max_examples=60)
@given(stays(), st.sampled_from([0.0, 30.0, 100.0]), st.sets(st.integers(1, 5), max_size=2))
def test_every_set_holds_what_a_loop_that_remembers_would_put_there(made, minutes, always):
    carried = carry_forward(made, minutes=minutes, always=always)
    for i in range(len(made)):
        assert sets_of(carried[i]) == carried_slowly(sets_of(made[i]), minutes, always)
        assert carried.labels[i] == made.labels[i]


@settings(deadline=None, max_examples=30)
@given(stays())
def test_counts_say_how_often_a_variable_was_observed_so_far(made):
    plain, counted = carry_forward(made, minutes=50.0), carry_forward(made, minutes=50.0, count_from=10)
    for i in range(len(made)):
        seen: dict[int, int] = {}
        for (_, raw), (minute, events), (same, more) in zip(
            sets_of(made[i]), sets_of(plain[i]), sets_of(counted[i]), strict=True
        ):
            for v, _ in raw:
                seen[v] = seen.get(v, 0) + 1
            assert same == minute
            assert sorted(more)[: len(events)] == events
            found = {v - 10: x for v, x in more if v >= 10}
            assert found == pytest.approx({v: math.log(seen[v]) for v, _ in events}, abs=1e-6)


def test_age_and_origin_of_what_is_carried():
    sample = {"id": "a", "label": 0, "var": [1, 2, 2], "val": [5, 6, 7], "set_minute": [0, 40], "set_size": [2, 1]}
    found = carry_stay(make_stays([sample])[0], minutes=60)
    assert found.var.tolist() == [1, 2, 1, 2]
    assert found.val.tolist() == [5, 6, 5, 7]
    assert found.age.tolist() == [0, 0, 40, 0]
    assert found.is_carry.tolist() == [False, False, True, False]


def test_a_stay_of_nothing_stays_one():
    sample = {"id": "a", "label": 0, "var": [NOTHING], "val": [0], "set_minute": [0], "set_size": [1]}
    assert sets_of(carry_forward(make_stays([sample]), minutes=60)[0]) == [(0.0, [(NOTHING, 0.0)])]


def test_a_variable_to_carry_that_nobody_knows_is_refused_with_the_nearest_name():
    variables = name_variables(["Weight", "HR"], width=4)
    assert numbers_of(variables, ["Weight"]) == [2]
    with pytest.raises(ConfigError, match="did you mean 'Weight'"):
        numbers_of(variables, ["Wieght"])
