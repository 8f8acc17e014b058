"""Samples of a packed row in order of falling length are the same samples in the same rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.planning.rows import Rows, longest_first

ROWS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=5)


@given(ROWS)
@settings(deadline=None, max_examples=60)
def test_every_row_keeps_its_samples_and_has_the_longest_first(rows):
    lengths = np.array([length for row in rows for length in row])
    ids = np.random.default_rng(len(lengths)).permutation(1000)[: len(lengths)]
    starts = np.cumsum([0, *map(len, rows)])
    length_of = dict(zip(ids.tolist(), lengths.tolist(), strict=True))
    before = Rows(ids, starts, 300, "packed")
    after = longest_first(before, lengths)
    assert (after.width, after.layout) == (300, "packed")
    for row in range(len(rows)):
        found = [length_of[i] for i in after.row(row).tolist()]
        assert found == sorted(rows[row], reverse=True)
        assert sorted(after.row(row).tolist()) == sorted(before.row(row).tolist())
        equal = [i for i in before.row(row).tolist() if length_of[i] == rows[row][0]]
        assert [i for i in after.row(row).tolist() if length_of[i] == rows[row][0]] == equal
