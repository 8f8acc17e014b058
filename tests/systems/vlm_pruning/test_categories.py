"""Samples by category: every count adds up, nobody gives more than they have, and turns are fair."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.systems.vlm_pruning.test_datasets import lines, record
from truebatch_systems.vlm_pruning.config import CategoryPriority
from truebatch_systems.vlm_pruning.data.datasets import balanced, load_split, share_counts, turn_counts

SIZES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 40), min_size=1)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, share=st.floats(0, 1))
def test_counts_add_up_and_are_fair(sizes, share):
    number = round(share * sum(sizes.values()))
    turns, shares = turn_counts(sizes, number), share_counts(sizes, number)
    for counts in (turns, shares):
        assert sum(counts.values()) == number
        assert all(0 <= counts[name] <= sizes[name] for name in sizes)
    open_ones = [turns[name] for name in sizes if turns[name] < sizes[name]]
    used_up = [turns[name] for name in sizes if turns[name] == sizes[name]]
    assert not open_ones or max(open_ones) - min(open_ones) <= 1
    assert not open_ones or not used_up or max(used_up) <= min(open_ones) + 1
    assert all(abs(shares[name] - number * sizes[name] / sum(sizes.values())) < 1 for name in sizes)


def test_the_first_of_every_category_are_taken():
    assert balanced(["a", "a", "b", "a", "c"], 3, "mean") == [0, 2, 4]
    assert balanced(["a", "a", "b", "a", "c"], 9, "origin") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("mode", "expected"), [("mean", {"rare": 4, "usual": 4}), ("origin", {"rare": 1, "usual": 7})])
def test_a_dataset_is_cut_by_category_and_always_the_same_way(tmp_path, mode, expected):
    made = [record(at, category="rare" if at % 8 == 0 else "usual", split="train") for at in range(32)]
    asked = replace(lines(tmp_path, made), train=8, category_priority=CategoryPriority(enable=True, mode=mode))
    taken = load_split(asked, "train")
    assert Counter(sample["category"] for sample in taken) == expected
    assert [sample["id"] for sample in taken] == [sample["id"] for sample in load_split(asked, "train")]
