"""A sum in a fixed tree does not depend on the order of its leaves, nor on who adds which of them."""

from itertools import pairwise
from random import Random

import pytest

from truebatch.training.exactness.tree import TreeSum, parts_of


def joined(left, right):
    return f"({left}+{right})"


def by_hand(leaves):
    """The same tree, written as one would on paper: neighbours in pairs, level by level."""
    while len(leaves) > 1:
        pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
        leaves = [joined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13, 16, 37])
def test_leaves_in_any_order_give_the_sum_on_paper(number):
    for seed in range(5):
        tree = TreeSum(number, joined)
        for leaf in Random(seed).sample(range(number), number):
            tree.add((0, leaf), str(leaf))
        assert list(tree.parts.values()) == [by_hand([str(i) for i in range(number)])]


@pytest.mark.parametrize("number", [1, 2, 7, 16, 21])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_parts_of_any_number_of_ranks_give_the_same_sum(number, ranks):
    each = -(-number // ranks)
    bounds = [min(each * r, number) for r in range(ranks + 1)]
    whole = TreeSum(number, joined)
    for first, end in pairwise(bounds):
        mine = TreeSum(number, joined)
        for leaf in range(first, end):
            mine.add((0, leaf), str(leaf))
        assert sorted(mine.parts) == parts_of(first, end, number)
        for node, part in sorted(mine.parts.items()):
            whole.add(node, part)
    assert list(whole.parts.values()) == [by_hand([str(i) for i in range(number)])]


def test_leaves_in_order_keep_one_part_waiting_per_level():
    tree = TreeSum(1000, joined)
    most = 0
    for leaf in range(1000):
        tree.add((0, leaf), "")
        most = max(most, len(tree.parts))
    assert most <= 10
