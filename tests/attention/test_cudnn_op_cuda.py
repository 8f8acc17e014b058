"""Planned attention on a GPU: cuDNN's kernels against the formula written out, in every way they are called."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from truebatch.attention import cudnn_op
from truebatch.attention.api import attend
from truebatch.attention.cudnn_graph import plans_are_possible
from truebatch.attention.cudnn_op import attend_by_plan
from truebatch.batch.segments import packed_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not plans_are_possible(), reason="no card, or no cuDNN package"
    ),
]
LENGTHS = [700, 300, 257, 90, 31, 5, 1]


def make(heads, key_heads, *, fused=False, width=64):
    """Query, key and value [1, H, T, D], as projections lay them, or as slices of one projection."""
    torch.manual_seed(0)
    counts = (heads, key_heads, key_heads)
    whole = torch.randn(1, sum(LENGTHS), sum(counts), width, device="cuda", dtype=torch.bfloat16)
    parts = whole.split(counts, dim=2) if fused else [part.contiguous() for part in whole.split(counts, dim=2)]
    return [part.transpose(1, 2).detach().requires_grad_() for part in parts]


def expected(parts, causal):
    """Every sample by itself, in fp32."""
    outs = []
    for one in zip(*(part.float().split(LENGTHS, dim=2) for part in parts), strict=True):
        outs.append(scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=True))
    return torch.cat(outs, dim=2)


def assert_close(way, parts, causal):
    grad = torch.randn(*parts[0].shape, device="cuda", dtype=torch.bfloat16)
    found, wanted = way(*parts), expected(parts, causal)
    got = torch.autograd.grad(found, parts, grad)
    right = torch.autograd.grad(wanted, parts, grad.float())
    for one, other in zip((found, *got), (wanted, *right), strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 0.01


@pytest.mark.parametrize("least", [0, 2**40], ids=["short kernels", "cuDNN alone"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(12, 12), (8, 2)])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_as_written(monkeypatch, heads, key_heads, causal, fused, least):
    monkeypatch.setattr(cudnn_op, "LEAST_SHORT_WORK", least)
    segments = packed_segments(LENGTHS).to("cuda")
    parts = make(heads, key_heads, fused=fused)
    assert_close(lambda *p: attend(*p, segments, causal=causal, kernel="planned"), parts, causal)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_the_operator_as_written_and_compiled(causal, compiled):
    segments = packed_segments(LENGTHS, slots=32).to("cuda")
    bounds, starts = segments.bounds_tensor, segments.starts

    def way(*parts):
        flat = (part.transpose(1, 2).flatten(0, 1) for part in parts)
        out = attend_by_plan(*flat, starts, bounds, causal=causal, scale=0.125)
        return out[None].transpose(1, 2)

    assert_close(torch.compile(way, dynamic=False) if compiled else way, make(8, 2), causal)


def test_another_stream_has_its_own_table_and_the_same_result():
    segments = packed_segments(LENGTHS).to("cuda")
    parts = make(4, 4)
    here = attend(*parts, segments, causal=True, kernel="planned")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        there = attend(*parts, segments, causal=True, kernel="planned")
    torch.cuda.synchronize()
    assert torch.equal(here, there)
    assert torch.equal(here, attend(*parts, segments, causal=True, kernel="planned"))
