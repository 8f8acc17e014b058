"""Prompts and completions as trees: shared cells count once, no row is too wide, every completion is in one row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import BatchError
from truebatch.planning.trees.pack_trees import plan_tree_rows
from truebatch.planning.trees.prefix_trees import grow_trees, tree_cells


def path_tokens(trees, node):
    found = []
    while node >= 0:
        found = [*trees.tokens[node], *found]
        node = int(trees.parents[node])
    return found


def test_equal_prompts_are_laid_out_once():
    trees = grow_trees([[1, 2, 3], [4, 5], [1, 2, 3]], [[7], [8, 9], [7, 7]])
    assert trees.tokens == [[1, 2, 3], [7], [7, 7], [4, 5], [8, 9]]
    assert trees.parents.tolist() == [-1, 0, 0, -1, 3]
    assert trees.leaf_of.tolist() == [1, 4, 2]


def test_nothing_is_shared_where_nobody_asks_for_it():
    trees = grow_trees([[1, 2], [1, 2]], [[7], [8]], share="nothing")
    assert trees.tokens == [[1, 2], [7], [1, 2], [8]]
    assert trees.parents.tolist() == [-1, 0, -1, 2]


def test_a_common_beginning_of_different_prompts_is_found_on_request():
    system = list(range(40))
    prompts = [[*system, 50, 51], [*system, 60], [*system, 50, 51], [99]]
    trees = grow_trees(prompts, [[1], [2], [3], [4]], share="beginnings")
    assert trees.tokens == [system, [50, 51], [1], [3], [60], [2], [99], [4]]
    assert trees.parents.tolist() == [-1, 0, 1, 1, 0, 4, -1, 6]


def test_costs_count_shared_cells_once():
    trees = grow_trees([[1] * 10] * 4, [[2] * 5] * 4)
    cost = tree_cells(trees)
    assert (cost.cells, cost.copied_cells) == (10 + 4 * 5, 4 * 15)
    assert cost.pairs == 10 * 11 // 2 + 4 * (5 * 10 + 5 * 6 // 2)
    assert cost.copied_pairs == 4 * 15 * 16 // 2


token_lists = st.lists(st.integers(0, 1), max_size=40)
pairs = st.lists(st.tuples(token_lists.filter(len), token_lists), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(pairs, st.integers(20, 120), st.sampled_from(["prompts", "beginnings", "nothing"]))
def test_every_completion_is_in_one_row_with_its_whole_path(some, cells, share):
    prompts, completions = (list(part) for part in zip(*some, strict=True))
    trees = grow_trees(prompts, completions, share=share)
    rows = plan_tree_rows(trees, cells)
    assert sorted(np.concatenate([row.completions for row in rows]).tolist()) == list(range(len(some)))
    for row in rows:
        nodes = set(row.nodes.tolist())
        for one in row.completions.tolist():
            assert path_tokens(trees, int(trees.prompt_of[one])) == prompts[one]
            node = int(trees.leaf_of[one])
            assert (trees.tokens[node] if node >= 0 else []) == completions[one]
            node = node if node >= 0 else int(trees.prompt_of[one])
            while node >= 0:
                assert node in nodes
                node = int(trees.parents[node])
        used = int(trees.lengths[row.nodes].sum())
        assert used <= cells or len(row.completions) == 1
    assert tree_cells(trees).cells <= tree_cells(trees).copied_cells


def test_a_tree_that_is_too_large_is_cut_between_completions():
    trees = grow_trees([[1] * 10] * 5, [[2] * 6] * 5)
    rows = plan_tree_rows(trees, 22)
    assert [row.completions.tolist() for row in rows] == [[0, 1], [2, 3], [4]]
    assert [int(trees.lengths[row.nodes].sum()) for row in rows] == [22, 22, 16]


@pytest.mark.parametrize(("prompts", "completions"), [([[1]], []), ([[1], []], [[2], [3]]), ([], [])])
def test_what_cannot_be_a_tree_is_refused(prompts, completions):
    with pytest.raises(BatchError):
        grow_trees(prompts, completions)
