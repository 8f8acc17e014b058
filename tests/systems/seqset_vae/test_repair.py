"""From rows of a file to sets, compared with a slow reader that goes row by row."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch_systems.seqset_vae.data.admissions import NOTHING
from truebatch_systems.seqset_vae.data.event_tables import Events
from truebatch_systems.seqset_vae.data.faults import Findings, Policy
from truebatch_systems.seqset_vae.data.repair import repair_stay

NUMBERS = {"(nothing charted)": 0, "a": 1, "b": 2, "c": 3}
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "unknown"]),
        st.one_of(st.integers(-5, 5).map(float), st.just(math.nan)),
        st.one_of(st.integers(-2, 4).map(float), st.just(math.inf)),
    ),
    max_size=14,
)


def events_of(rows: list[tuple[str, float, float]]) -> Events:
    return Events(
        path=Path("stay.parquet"),
        rows=np.arange(len(rows)),
        variable=np.array([r[0] for r in rows], dtype=object),
        value=np.array([r[1] for r in rows], dtype=np.float64),
        minute=np.array([r[2] for r in rows], dtype=np.float64),
    )


def slowly(rows: list[tuple[str, float, float]]) -> tuple[dict[float, dict[int, float]], dict[str, int]]:
    """{minute: {variable: value}}, and how many faults of each kind."""
    counts: dict[str, int] = {}

    def keep(kind: str, good: Any) -> list[tuple[str, float, float]]:
        bad = [row for row in rows if not good(row)]
        if bad:
            counts[kind] = len(bad)
        return [row for row in rows if good(row)]

    rows = keep("unknown_variable", lambda row: row[0] in NUMBERS)
    rows = keep("not_finite", lambda row: math.isfinite(row[1]))
    rows = keep("bad_time", lambda row: math.isfinite(row[2]))
    back = sum(b[2] < a[2] for a, b in pairwise(rows))
    counts |= {"unsorted": back} if back else {}
    early = sum(row[2] < 0 for row in rows)
    counts |= {"negative_minute": early} if early else {}
    sets: dict[float, dict[int, float]] = {}
    for name, value, minute in sorted(rows, key=lambda row: row[2]):
        inside = sets.setdefault(max(minute, 0.0), {})
        if NUMBERS[name] in inside:
            counts["duplicate"] = counts.get("duplicate", 0) + 1
        inside[NUMBERS[name]] = value
    if not rows:
        counts["empty"] = 1
    return sets, counts


@settings(deadline=None, max_examples=100)
@given(ROWS)
def test_a_stay_holds_what_a_slow_reader_finds_and_every_fault_is_counted(rows):
    findings = Findings(Policy(drop_faulty=True))
    found = repair_stay("stay", events_of(rows), dict(NUMBERS), findings)
    sets, counts = slowly(rows)
    assert {kind: one.number for kind, one in findings.found.items()} == counts
    if not sets:
        assert list(found["var"]) == [NOTHING]
        return
    assert list(found["set_minute"]) == sorted(sets)
    starts = np.cumsum([0, *found["set_size"]])
    for k, minute in enumerate(sorted(sets)):
        inside = slice(starts[k], starts[k + 1])
        assert dict(zip(found["var"][inside].tolist(), found["val"][inside].tolist(), strict=True)) == sets[minute]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), min_size=1, max_size=9, unique=True), st.randoms()
)
def test_the_order_of_rows_does_not_matter_where_no_variable_is_there_twice(pairs, random):
    rows = [(name, float(i), float(minute)) for i, (minute, name) in enumerate(pairs)]
    shuffled = list(rows)
    random.shuffle(shuffled)
    one, other = (repair_stay("stay", events_of(r), dict(NUMBERS), Findings()) for r in (rows, shuffled))
    for name in ("var", "val", "set_minute", "set_size"):
        np.testing.assert_array_equal(one[name], other[name])


def test_given_sets_are_kept_apart_even_at_one_time():
    rows = [("a", 1.0, 5.0), ("a", 2.0, 5.0), ("b", 3.0, 7.0)]
    events = events_of(rows)
    given_sets = Events(**{f: getattr(events, f) for f in ("path", "rows", "variable", "value", "minute")},
                        set_index=np.array([0, 1, 2]))  # fmt: skip
    found = repair_stay("stay", given_sets, dict(NUMBERS), Findings())
    assert list(found["set_size"]) == [1, 1, 1]
    assert list(found["set_minute"]) == [5.0, 5.0, 7.0]
