"""Sets in buckets against one set at a time, in plain operations."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch_systems.seqset_vae.model.set_attention import InducedBlock, choose_widths, lay_sets
from truebatch_systems.seqset_vae.train.loss import reconstruction

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=30).map(lambda s: np.array(s, dtype=np.int64))


def written_out(block, x):
    """The block on one set [n, Z], as its definition says it."""

    def look(query, key, value):
        heads = []
        for q, k, v in zip(
            query.chunk(block.heads, -1), key.chunk(block.heads, -1), value.chunk(block.heads, -1), strict=True
        ):
            heads.append(torch.softmax(q @ k.T / math.sqrt(q.shape[-1]), dim=-1) @ v)
        return torch.cat(heads, dim=-1)

    key, value, query = block.event_projections(x).chunk(3, -1)
    points = block.of_points(look(block.point_query(block.points), key, value))
    return block.of_events(look(query, *block.point_key_value(points).chunk(2, -1)))


def nearest_by_hand(decoded, target):
    """The loss of one set, pair by pair."""
    total = 0.0
    for weight, distance in (
        (1.0, lambda a, b: 1 - float(a @ b / (a.norm() * b.norm()))),
        (1.0, lambda a, b: abs(float(a.norm() - b.norm()))),
        (3.0, lambda a, b: float((a - b).square().sum())),
    ):
        table = np.array([[distance(a, b) for b in target] for a in decoded])
        total += weight * 0.5 * (table.min(1).mean() + table.min(0).mean())
    return total


@settings(deadline=None, max_examples=25)
@given(SIZES, st.sampled_from([1, 20, 10_000]))
def test_attention_in_buckets_is_attention_in_each_set(sizes, call_cells):
    torch.manual_seed(0)
    block = InducedBlock(8, 2, 3)
    layout = lay_sets(sizes, call_cells=call_cells)
    events = torch.randn(int(sizes.sum()), 8)
    starts = np.cumsum([0, *sizes])
    with torch.no_grad():
        found = torch.empty_like(events)
        found[layout.event_order] = block(events[layout.event_order], layout)
        for a, b in pairwise(starts):
            assert torch.allclose(found[a:b], written_out(block, events[a:b]), atol=2e-6)


@settings(deadline=None, max_examples=25)
@given(SIZES, st.sampled_from([1, 20, 10_000]))
def test_the_loss_of_a_set_is_that_of_its_pairs(sizes, call_cells):
    torch.manual_seed(1)
    layout = lay_sets(sizes, call_cells=call_cells)
    decoded, target = torch.randn(2, int(sizes.sum()), 5)
    found = reconstruction(decoded[layout.event_order], target[layout.event_order], layout)[layout.back]
    starts = np.cumsum([0, *sizes])
    for k, (a, b) in enumerate(pairwise(starts)):
        assert found[k].item() == pytest.approx(nearest_by_hand(decoded[a:b], target[a:b]), rel=1e-4)


@settings(deadline=None, max_examples=50)
@given(SIZES, st.integers(1, 200))
def test_events_go_into_their_cells_and_come_back(sizes, call_cells):
    layout = lay_sets(sizes, call_cells=call_cells)
    events = torch.arange(int(sizes.sum()), dtype=torch.float32)[layout.event_order]
    assert sorted(events.tolist()) == list(range(len(events)))
    cells = zip(layout.buckets, layout.in_cells(events), strict=True)
    assert torch.equal(torch.cat([bucket.take(part) for bucket, part in cells]), events)
    sums = torch.cat([part.sum(1) for part in layout.in_cells(torch.ones_like(events))])
    assert torch.equal(sums, layout.sizes)
    assert layout.sizes[layout.back].tolist() == sizes.tolist()


@settings(deadline=None, max_examples=50)
@given(SIZES, st.integers(1, 60))
def test_the_buckets_are_the_cheapest_there_are(sizes, call_cells):
    found = choose_widths(sizes, call_cells)

    def cost(widths):
        width_of = np.array(widths)[np.searchsorted(widths, sizes)]
        return int(width_of.sum()) + call_cells * len(widths)

    distinct = sorted(set(sizes.tolist()))
    everything = [
        [w for k, w in enumerate(distinct[:-1]) if bits >> k & 1] + distinct[-1:]
        for bits in range(2 ** (len(distinct) - 1))
    ]
    assert cost(found) == min(cost(widths) for widths in everything)


def test_equal_sets_lie_in_one_bucket_without_padding():
    layout = lay_sets(np.full(9, 4))
    assert len(layout.buckets) == 1
    assert layout.buckets[0].cell_of_event is None
    assert layout.num_cells == 36


def test_a_bucket_has_no_more_sets_than_a_kernel_can_count(monkeypatch):
    torch.manual_seed(0)
    block, sizes = InducedBlock(8, 2, 3), np.array([2, 5, 2, 2, 4, 5, 2, 2])
    events = torch.randn(int(sizes.sum()), 8)
    whole = block(events, lay_sets(sizes, call_cells=10_000))
    monkeypatch.setattr("truebatch_systems.seqset_vae.model.set_attention.MOST_SETS", 3)
    layout = lay_sets(sizes, call_cells=10_000)
    assert [bucket.shape for bucket in layout.buckets] == [(3, 5), (3, 5), (2, 5)]
    assert torch.allclose(block(events, layout), whole, atol=1e-6)
