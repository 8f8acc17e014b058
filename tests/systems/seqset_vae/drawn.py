"""Stays drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from truebatch_systems.seqset_vae.data.admissions import Stays, make_stays


@st.composite
def stays(draw: Any, *, most_stays: int = 5, most_sets: int = 6, num_variables: int = 6) -> Stays:
    """A few stays, sorted by time, every variable once a set."""
    samples = []
    for i in range(draw(st.integers(1, most_stays))):
        minutes = sorted(draw(st.lists(st.integers(0, 400), min_size=1, max_size=most_sets, unique=True)))
        sets = [
            sorted(draw(st.sets(st.integers(1, num_variables - 1), min_size=1, max_size=num_variables - 1)))
            for _ in minutes
        ]
        var = np.array([v for one in sets for v in one])
        val = np.array(draw(st.lists(st.integers(-9, 9), min_size=len(var), max_size=len(var))), dtype=np.float32)
        sizes = [len(one) for one in sets]
        label = draw(st.sampled_from([-1, 0, 1]))
        samples.append(
            {"id": f"p{i}", "label": label, "var": var, "val": val, "set_minute": minutes, "set_size": sizes}
        )
    return make_stays(samples)


def sets_of(sample: dict[str, Any]) -> list[tuple[float, list[tuple[int, float]]]]:
    """A sample as plain lists: (minute, [(variable, value), ...]) for every set."""
    events = list(zip(sample["set_id"].tolist(), sample["var"].tolist(), sample["val"].tolist(), strict=True))
    minutes = sample["set_minute"].tolist()
    return [(minutes[s], [(v, x) for t, v, x in events if t == s]) for s in range(len(minutes))]
