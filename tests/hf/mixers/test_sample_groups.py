"""Samples of packed rows taken out as groups of padded rows and put back."""

from __future__ import annotations

import pytest
import torch

from truebatch.batch.segments import packed_segments, stack_rows
from truebatch.hf.mixers.axes import name_axes, put_groups, take_first, take_group
from truebatch.hf.mixers.sample_groups import SHARE, SLACK, group_samples

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


def test_a_group_holds_similar_lengths_or_equal_ones():
    table = packed_segments(LENGTHS)
    for group in group_samples({"cells": table}, equal=False):
        lengths = group["cells"].is_real.sum(1)
        assert int(lengths.max() - lengths.min()) <= max(SLACK, int(lengths.max()) // SHARE)
    assert all(group["cells"].is_real.all() for group in group_samples({"cells": table}, equal=True))


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
