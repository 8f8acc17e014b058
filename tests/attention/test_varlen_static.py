"""Attention from a table of fixed shape is attention inside each segment, forward and backward.

The kernel itself needs a GPU; here a plain one stands in for it, one call of SDPA a segment.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import counting_backend
from truebatch.attention import varlen_static
from truebatch.attention.api import attend
from truebatch.attention.varlen import call_varlen
from truebatch.attention.varlen_static import (
    attend_fixed_table,
    keep_keys,
    kept_keys,
    no_kept_keys,
    read_bounds,
)
from truebatch.batch.segments import SHORT, packed_segments

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def plain(query, key, value, starts, causal, scale):
    segments = packed_segments(starts.diff().tolist())
    rows = (part[None].transpose(1, 2) for part in (query, key, value))
    return attend(*rows, segments, causal=causal, scale=scale)[0].transpose(0, 1)


def stand_in_forward(query, key, value, call):
    assert max(int(call.starts.diff().max()), 2) == call.longest
    assert (call.left, call.right) == ((-1, 0) if call.causal else (-1, -1))
    out = plain(query, key, value, call.starts, call.causal, call.scale)
    return out.contiguous(), query.new_zeros(query.shape[1], query.shape[0])


def stand_in_backward(grad, query, key, value, out, lse, call):
    """The gradients of softmax attention written out: operators run below autograd."""
    grads = [torch.zeros_like(part) for part in (query, key, value)]
    share = query.shape[1] // key.shape[1]
    for begin, end in pairwise(call.starts.tolist()):
        q, k, v, g = (part[begin:end].transpose(0, 1) for part in (query, key, value, grad))
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        scores = q @ k.transpose(1, 2) * call.scale
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1) & call.causal
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        of_p = g @ v.transpose(1, 2)
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * call.scale
        found = [of_scores @ k, of_scores.transpose(1, 2) @ q, p.transpose(1, 2) @ g]
        for whole, part in zip(grads, found, strict=True):
            heads = part.unflatten(0, (whole.shape[1], -1)).sum(1)
            whole[begin:end] = heads.transpose(0, 1)
    return tuple(grads)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(varlen_static, "flash_forward", stand_in_forward)
    monkeypatch.setattr(varlen_static, "flash_backward", stand_in_backward)


def make(cells, heads=(4, 2, 2), width=8):
    chance = torch.Generator().manual_seed(cells)
    return [torch.randn(cells, h, width, generator=chance).requires_grad_() for h in heads]


def assert_inside_segments(segments, causal, attend_quickly):
    """Output and gradients of a way to attend are those of attention inside segments, at scale 0.4."""
    results = []
    for run in (
        attend_quickly,
        lambda parts: plain(*parts, segments.starts[: len(segments.lengths) + 1], causal, 0.4),
    ):
        parts = make(segments.num_cells)
        out = run(parts)
        (out.sin() * torch.linspace(-1, 1, out.shape[0])[:, None, None]).sum().backward()
        results.append([out.detach(), *(part.grad for part in parts)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def count_compilations(options):
    """How often variable-length attention is compiled for three rows of one shape; results are those as written."""
    torch.compiler.reset()
    graphs, count = counting_backend()

    def run(query, key, value, starts, bounds):
        rule = {"causal": True, "window": None, "scale": None, **options}
        return call_varlen(query, key, value, starts, max_length=bounds, **rule) * 2

    compiled = torch.compile(run, backend=count, dynamic=False, fullgraph=True)
    for lengths in ([50, 20, 3, 1], [60, 1], [9, 9, 9, 9, 9]):
        segments = packed_segments(lengths, cells=80, slots=20)
        parts = make(80)
        table = (segments.starts, segments.bounds_tensor)
        torch.testing.assert_close(compiled(*parts, *table), run(*parts, *table))
    return len(graphs)


@given(
    st.lists(st.sampled_from([0, 1, 7, 60, 256, 257, 300]), min_size=1, max_size=12),
    st.integers(0, 290),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=120)
def test_bounds_are_of_the_segments_that_are_there(lengths, extra, empty):
    cells = sum(lengths) + extra
    segments = packed_segments(lengths, cells=cells, slots=len(lengths) + 2 + empty)
    found = read_bounds(segments.bounds_tensor)
    assert int(segments.starts[found.used]) == cells
    assert found.longest == max([*lengths, min(extra, max(*lengths, 256))])
    assert (segments.starts[: found.used + 1].diff() > 0).all()
    assert int(segments.starts[found.long]) == found.long_cells
    long = [size > SHORT for size in lengths if size]
    assert not any(long[found.long :])
    assert found.long == 0 or long[found.long - 1]


def test_samples_without_cells_leave_no_segment_behind():
    """Kernels are given as many segments as there are; an empty one among them would hide the last."""
    segments = packed_segments([5, 0, 3, 0], cells=10, slots=8)
    assert segments.starts.tolist() == [0, 5, 8, 10, 10, 10, 10, 10, 10]
    assert read_bounds(segments.bounds_tensor).used == 3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[50, 40, 9, 8, 2, 1], [3, 50, 1, 7], [5]])
def test_attention_from_a_fixed_table_is_attention_inside_segments(kernel, lengths, causal):
    segments = packed_segments(lengths, cells=sum(lengths) + 7, slots=20)
    assert_inside_segments(
        segments,
        causal,
        lambda parts: attend_fixed_table(
            *parts, segments.starts, segments.bounds_tensor, (-1, 0 if causal else -1), 0.4
        ),
    )


def test_one_compilation_serves_every_row_of_one_shape(kernel):
    assert count_compilations({}) == 1


def test_the_operators_are_registered_as_torch_wants_them(kernel):
    segments = packed_segments([9, 8, 1], slots=8)
    parts = [part.detach() for part in make(18)]  # a function of autograd ties them together
    table = (segments.starts, segments.bounds_tensor, [-1, 0, 0.5])
    torch.library.opcheck(torch.ops.truebatch.attend_fixed_table.default, (*parts, *table))
    results = torch.ops.truebatch.attend_fixed_table(*parts, *table)
    torch.library.opcheck(torch.ops.truebatch.attend_fixed_table_backward.default, (parts[0], *parts, *results, *table))


def test_keys_of_another_part_of_a_model_are_not_kept():
    one, other = torch.zeros(2, 1, 4), torch.ones(2, 1, 4)
    with kept_keys() as kept:
        keep_keys(one, one)
        with no_kept_keys():
            keep_keys(other, other)
        keep_keys(one, one)
    assert [key.sum() for key, _ in kept] == [0, 0]
    with no_kept_keys():
        keep_keys(other, other)
