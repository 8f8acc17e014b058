"""A tree of segments in one row gives every path what it has as a row of its own."""

import pytest
import torch

from truebatch.attention.api import attend, may_attend
from truebatch.attention.forest import attend_forest
from truebatch.attention.score_rule import Rule
from truebatch.batch.forest import ancestors_of
from truebatch.batch.segments import cell_positions, forest_segments, stack_rows
from truebatch.errors import AttentionError

FORESTS = {
    "a prompt and its answers": ([5, 3, 1, 4], [-1, 0, 0, 0]),
    "several levels": ([3, 2, 4, 1, 1, 2, 3], [-1, 0, 1, 1, 0, 4, -1]),
    "a chain": ([2, 2, 2], [-1, 0, 1]),
    "no children": ([4, 2], [-1, -1]),
    "two prompts": ([2, 3, 3, 4, 2, 2], [-1, 0, 0, -1, 3, 3]),
}
KERNELS = ["merged", "per_segment"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def alone(parts, segments, scale):
    """Slow and obvious: the cells of each path as a row of their own, of which the last segment is kept."""
    starts = [sum(segments.lengths[:at]) for at in range(len(segments.lengths))]
    outs = []
    for at, length in enumerate(segments.lengths):
        path = ancestors_of(segments.forest.parents, at)
        cells = torch.cat([torch.arange(starts[one], starts[one] + segments.lengths[one]) for one in path])
        q, k, v = (part[:, :, cells] for part in parts)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) * scale
        later = torch.ones(len(cells), len(cells), dtype=torch.bool).triu(1)
        outs.append((scores.masked_fill(later, -torch.inf).softmax(-1) @ v)[:, :, -length:])
    return torch.cat(outs, dim=2)


def made(lengths, parents, dtype=torch.float32, heads=(4, 2), width=8, cells=None):
    segments = forest_segments(lengths, parents, cells=cells)
    chance = torch.Generator().manual_seed(3)
    shapes = [(1, heads[0], segments.num_cells, width), *[(1, heads[1], segments.num_cells, width)] * 2]
    parts = [torch.randn(shape, generator=chance, dtype=dtype).requires_grad_() for shape in shapes]
    return segments, parts, torch.randn(shapes[0], generator=chance, dtype=dtype)


def close(one, other):
    return (one - other).norm() <= TOLERANCE[one.dtype] * other.norm()


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_every_path_is_what_it_is_alone(name, kernel, dtype, heads):
    segments, parts, grad = made(*FORESTS[name], dtype, heads)
    wanted = alone(parts, segments, 0.3)
    found = attend_forest(Rule(causal=True, scale=0.3), *parts, segments, kernel=kernel)
    assert close(found, wanted)
    for one, other in zip(
        torch.autograd.grad(found, parts, grad), torch.autograd.grad(wanted, parts, grad), strict=True
    ):
        assert close(one, other)


def test_attend_serves_forests_with_padding_and_several_rows():
    rows = [forest_segments([3, 2, 2], [-1, 0, 0], cells=10), forest_segments([4, 3], [-1, 0], cells=10)]
    both = stack_rows(rows)
    chance = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 2, 10, 4, generator=chance) for _ in range(3)]
    found = attend(*parts, both, causal=True)
    for at, row in enumerate(rows):
        own = attend(*(part[at : at + 1] for part in parts), row, causal=True)
        real = row.is_real[0]
        assert torch.equal(found[at][:, real], own[0][:, real])


def test_what_lies_in_padding_reaches_no_path():
    segments, parts, _ = made(*FORESTS["several levels"], cells=20)
    empty = ~segments.is_real[0]
    spoiled = [part.detach().clone() for part in parts]
    for part in spoiled:
        part[:, :, empty] = torch.nan
    clean = attend(*parts, segments, causal=True)[:, :, ~empty]
    assert torch.equal(attend(*spoiled, segments, causal=True)[:, :, ~empty], clean)


def test_the_mask_shows_a_cell_its_own_segment_and_its_ancestors():
    segments = forest_segments([2, 1, 1], [-1, 0, 0], cells=5)
    seen = may_attend(segments, causal=True)[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 1]]


def test_positions_go_on_from_the_prompt():
    segments = forest_segments([3, 2, 1, 2], [-1, 0, 1, 0], cells=10)
    assert cell_positions(segments)[0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 0, 0]


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ({"causal": False}, "both directions"),
        ({"causal": True, "window": 4}, "window of 4"),
        ({"causal": True, "dropout": 0.1}, "dropout"),
        ({"causal": True, "softcap": 30.0}, "softcap"),
        ({"causal": True, "sinks": torch.zeros(4)}, "sinks"),
        ({"causal": True, "bias": torch.zeros(1, 1, 1, 1)}, "bias"),
    ],
)
def test_rules_that_a_shared_beginning_cannot_follow_are_refused_by_name(rule, named):
    segments, parts, _ = made(*FORESTS["a prompt and its answers"])
    with pytest.raises(AttentionError, match=named):
        attend(*parts, segments, **rule)


def test_a_window_longer_than_every_path_changes_nothing():
    segments, parts, _ = made(*FORESTS["a prompt and its answers"])
    whole = attend(*parts, segments, causal=True)
    assert torch.equal(attend(*parts, segments, causal=True, window=9), whole)
