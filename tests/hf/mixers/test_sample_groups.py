"""Samples of packed rows taken out as groups of padded rows and put back."""

from __future__ import annotations

import itertools

import pytest
import torch

from truebatch.batch.segments import packed_segments, stack_rows
from truebatch.hf.mixers.axes import name_axes, put_groups, take_first, take_group
from truebatch.hf.mixers.sample_groups import BLOCK, CALL, group_samples

LENGTHS = [5, 300, 1, 40, 41, 5, 280]


def two_rows():
    return stack_rows([packed_segments(part, cells=400) for part in (LENGTHS[:3], LENGTHS[3:])])


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("table", [packed_segments(LENGTHS, cells=700), two_rows()])
def test_every_cell_of_every_sample_comes_back_where_it_was(equal, table):
    groups = group_samples({"cells": table}, equal=equal)
    values = torch.randn(*table.shape, 3)
    axes = ("rows", "cells", None)
    back = put_groups([take_group(values, axes, group) for group in groups], axes, groups)
    assert torch.equal(back, values * table.is_real[..., None])
    turned = values.transpose(1, 2)
    axes = ("rows", None, "cells")
    back = put_groups([take_group(turned, axes, group) for group in groups], axes, groups)
    assert torch.equal(back, turned * table.is_real[:, None])


def cost(lengths, groups):
    """What groups of these samples cost, as the module says it: padded cells in whole blocks, and a call each."""
    padded = [len(group) * max(-(-lengths[i] // BLOCK) * BLOCK for i in group) for group in groups]
    return sum(padded) + CALL["cpu"] * len(groups)


def found_groups(lengths, *, equal=False):
    """The numbers of the samples of every group."""
    starts = {start: number for number, start in enumerate(itertools.accumulate([0, *lengths[:-1]]))}
    groups = group_samples({"cells": packed_segments(lengths)}, equal=equal)
    return [[starts[int(cells[0])] for cells in group["cells"].cells] for group in groups]


def test_groups_cost_as_little_as_any_others_of_neighbouring_lengths():
    for lengths in (LENGTHS, [70, 130, 200, 40, 260, 330, 129], [1] * 6, [9], [64, 65, 128, 129, 192, 193]):
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        cuts = itertools.product((False, True), repeat=len(lengths) - 1)
        every = [[list(part) for part in cut_after(order, cut)] for cut in cuts]
        found = found_groups(lengths)
        assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
        assert cost(lengths, found) == min(cost(lengths, groups) for groups in every)


def cut_after(order, cut):
    """The order in pieces, cut wherever `cut` says so."""
    where = [i + 1 for i, is_cut in enumerate(cut) if is_cut]
    return [order[a:b] for a, b in itertools.pairwise([0, *where, len(order)])]


def test_a_group_of_equal_lengths_pads_nothing():
    assert all(group["cells"].is_real.all() for group in group_samples({"cells": packed_segments(LENGTHS)}, equal=True))
    assert len(found_groups(LENGTHS, equal=True)) == len(set(LENGTHS))


def test_samples_of_two_axes_stay_together():
    cells, targets = packed_segments([4, 30, 2]), packed_segments([9, 2, 8])
    groups = group_samples({"cells": cells, "targets": targets}, equal=False)
    found = [
        (int(a), int(b))
        for group in groups
        for a, b in zip(group["cells"].is_real.sum(1), group["targets"].is_real.sum(1), strict=True)
    ]
    assert sorted(found) == [(2, 8), (4, 9), (30, 2)]


def test_a_mask_of_whole_rows_is_cut_and_hides_the_padding():
    table = packed_segments([2, 4])
    (group,) = group_samples({"cells": table}, equal=False)
    whole = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    cut = take_group(whole, ("rows", None, "cells", "cells"), group)
    assert torch.equal(cut[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())
    assert not cut[1, 0, :, 2:].any()
    assert torch.equal(cut[1, 0, :2, :2], torch.ones(2, 2, dtype=torch.bool).tril())


def test_what_counts_cells_is_cut_from_the_beginning():
    table = packed_segments([2, 4])
    (group,) = group_samples({"cells": table}, equal=False)
    assert take_first(torch.arange(6)[None], ("rows", "cells"), group, None).tolist() == [[0, 1, 2, 3]] * 2
    folded = take_first(torch.arange(18).view(3, 1, 6), (None, "rows", "cells"), group, 0)
    assert folded.shape == (6, 1, 4)


def test_an_axis_is_known_by_how_it_grows():
    sizes = {"cells": (47, 30), "targets": (29, 21)}
    assert name_axes((1, 8, 29, 47), (1, 8, 21, 30), sizes) == ("rows", None, "targets", "cells")
    assert name_axes((1, 47, 47), (1, 47, 47), sizes) == (None, None, None)
    assert name_axes((1, 50), (1, 33), sizes) is None
