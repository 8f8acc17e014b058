"""Attention inside samples equals one sample alone, whatever lies around it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from truebatch.attention import api
from truebatch.attention.api import attend, attend_table, gather_facts
from truebatch.attention.dispatch import choose_kernel
from truebatch.attention.score_rule import Rule
from truebatch.batch.segments import Segments, packed_segments, padded_segments
from truebatch.errors import AttentionError

KERNELS = ["per_segment", "block"]


def attend_alone(
    q: Tensor, k: Tensor, v: Tensor, *, causal, window=None, scale=None, bias=None, softcap=None, sinks=None
):
    """One sample [H, L, D], one query at a time: slow and obvious."""
    group = q.shape[0] // k.shape[0]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = [j for j in range(q.shape[1]) if (j <= i or not causal) and (window is None or abs(i - j) < window)]
            score = k[h // group, seen] @ q[h, i] * (scale or 1 / math.sqrt(q.shape[2]))
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if bias is not None:
                score = score + bias[h, i, seen]
            if sinks is not None:
                score = torch.cat([score, sinks[h : h + 1]])
            out[h, i] = torch.softmax(score, 0)[: len(seen)] @ v[h // group, seen]
    return out


def cells_of(segments: Segments) -> list[tuple[int, int, int]]:
    width = segments.shape[1]
    pairs = zip(segments.sample_starts, segments.sample_lengths, strict=True)
    return [(*divmod(start, width), length) for start, length in pairs if length]


def make(segments: Segments, *, heads=4, kv_heads=2, width=8, seed=0, out_width=8):
    rows, cells = segments.shape
    chance = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, cells, width), (rows, kv_heads, cells, width), (rows, kv_heads, cells, out_width)]
    parts = [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes]
    return [part.requires_grad_() for part in parts]


def expected_of(parts: list[Tensor], segments: Segments, **rule) -> Tensor:
    bias = rule.pop("bias", None)
    out = torch.zeros(*parts[0].shape[:3], parts[2].shape[3], dtype=torch.float64)
    for row, first, length in cells_of(segments):
        span = slice(first, first + length)
        cut = None if bias is None else bias.expand(len(out), -1, -1, -1)[row, :, span, span]
        out[row, :, span] = attend_alone(*(part[row, :, span] for part in parts), bias=cut, **rule)
    return out


def assert_same(parts: list[Tensor], segments: Segments, kernel: str | None, **rule) -> None:
    weight = (
        torch.randn(*parts[0].shape[:3], parts[2].shape[3], dtype=torch.float64) * segments.is_real[:, None, :, None]
    )
    out = attend(*parts, segments, kernel=kernel, **rule)
    assert out.isfinite().all()
    expected = expected_of(parts, segments, **rule)
    torch.testing.assert_close(out * (weight != 0), expected * (weight != 0), atol=1e-10, rtol=1e-10)
    got = torch.autograd.grad((out * weight).sum(), parts)
    want = torch.autograd.grad((expected * weight).sum(), parts)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


lengths_of_samples = st.lists(st.integers(1, 7), min_size=1, max_size=4)
layouts = st.sampled_from(["packed", "right", "left"])


def lay(lengths: list[int], layout: str, extra: int) -> Segments:
    if layout == "packed":
        return packed_segments(lengths, cells=sum(lengths) + extra, slots=12)
    return padded_segments(lengths, max(lengths) + extra, layout)


@settings(deadline=None, max_examples=40)
@given(lengths_of_samples, layouts, st.integers(0, 3), st.booleans(), st.sampled_from([None, 1, 3]))
def test_every_sample_attends_as_if_alone_in_every_layout(lengths, layout, extra, causal, window):
    segments = lay(lengths, layout, extra)
    parts = make(segments)
    for kernel in (None, *KERNELS):
        assert_same(parts, segments, kernel, causal=causal, window=window)


@settings(deadline=None, max_examples=25)
@given(
    lengths_of_samples,
    layouts,
    st.booleans(),
    st.sampled_from([None, 2]),
    st.sampled_from(["softcap", "sinks", "bias"]),
)
def test_bias_softcap_and_sinks_reach_the_scores_of_every_sample(lengths, layout, causal, window, extra):
    segments = lay(lengths, layout, 2)
    cells = segments.shape[1]
    rule = {
        "softcap": {"softcap": 0.7},
        "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
        "bias": {"bias": torch.randn(1, 4, cells, cells, dtype=torch.float64)},
    }[extra]
    for kernel in (None, *KERNELS):
        assert_same(make(segments), segments, kernel, causal=causal, window=window, scale=0.3, **rule)


@pytest.mark.parametrize("fill", [1e8, math.nan, math.inf])
@pytest.mark.parametrize("layout", ["packed", "right", "left"])
@pytest.mark.parametrize("causal", [True, False])
def test_what_lies_in_padding_never_matters(fill, layout, causal):
    segments = lay([5, 3, 5], layout, 2)
    parts = make(segments)
    real = segments.is_real[:, None, :, None]
    dirty = [torch.where(real, part.detach(), fill).requires_grad_() for part in parts]
    for kernel in (None, *KERNELS):
        clean_out = attend(*parts, segments, causal=causal, kernel=kernel)
        dirty_out = attend(*dirty, segments, causal=causal, kernel=kernel)
        assert torch.equal(clean_out.masked_fill(~real, 0), dirty_out.masked_fill(~real, 0))
        grads = torch.autograd.grad(dirty_out.masked_fill(~real, 0).square().sum(), dirty)
        clean = torch.autograd.grad(clean_out.masked_fill(~real, 0).square().sum(), parts)
        for one, other in zip(grads, clean, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
            assert not one.masked_fill(real, 0).any()


def test_right_padded_rows_with_little_padding_need_no_mask_and_are_the_same():
    segments = padded_segments([6, 7, 7], 7)
    parts = make(segments)
    facts = gather_facts(parts[0], parts[2], segments, Rule(causal=True))
    assert choose_kernel(facts) == "plain"
    assert_same(parts, segments, None, causal=True)


def test_a_gradient_given_to_padding_does_not_reach_a_sample():
    segments = padded_segments([6, 7, 7], 7)
    for kernel in ("plain", "block", "per_segment"):
        parts = make(segments)
        out = attend(*parts, segments, causal=True, kernel=kernel)
        padding = out.masked_select(~segments.is_real[:, None, :, None]).sum()
        for grad in torch.autograd.grad(padding, parts, allow_unused=True, materialize_grads=True):
            assert not grad.any()


def test_values_may_be_narrower_than_keys():
    segments = packed_segments([4, 2], cells=8)
    for kernel in KERNELS:
        assert_same(make(segments, out_width=4), segments, kernel, causal=True)


def test_neighbours_never_change_a_bit_on_cpu():
    long = packed_segments([5, 40, 5])
    parts = make(long)
    base = attend(*parts, long, causal=True, kernel="per_segment")
    changed = [part.detach().clone() for part in parts]
    for part in changed:
        part[:, :, 5:45] = 3
    again = attend(*changed, long, causal=True, kernel="per_segment")
    assert torch.equal(base[:, :, :5], again[:, :, :5])
    assert torch.equal(base[:, :, 45:], again[:, :, 45:])


@pytest.mark.parametrize("kernel", ["per_segment", "block", "plain"])
def test_dropout_is_applied_and_keeps_the_mean(kernel):
    segments = padded_segments([6, 6], 6)
    parts = [part.detach().float() for part in make(segments)]
    torch.manual_seed(0)
    plain = attend(*parts, segments, causal=True, kernel=kernel)
    drawn = torch.stack([attend(*parts, segments, causal=True, dropout=0.5, kernel=kernel) for _ in range(1500)])
    assert not torch.equal(drawn[0], drawn[1])
    error = (drawn.mean(0) - plain).abs() / (drawn.std(0) / math.sqrt(len(drawn)) + 1e-6)
    assert error.max() < 6


def test_a_bare_table_is_left_to_the_caller_where_a_loop_needs_host_lengths():
    segments = packed_segments([4, 2], slots=5)
    parts = make(segments)
    assert attend_table(*parts, segments.starts, Rule(causal=True), max_length=4) is None


@pytest.mark.parametrize("window", [None, 2, 9])
def test_a_bare_table_under_compilation_gives_the_same_without_host_lengths(window):
    segments = packed_segments([4, 2, 1], cells=9, slots=6)
    parts = make(segments)
    compiled = torch.compile(attend_table, backend="eager", fullgraph=True)
    out = compiled(*parts, segments.starts, Rule(causal=True, window=window), max_length=4)
    real = segments.is_real[:, None, :, None]
    expected = expected_of(parts, segments, causal=True, window=window)
    torch.testing.assert_close(out.masked_fill(~real, 0), expected, atol=1e-10, rtol=1e-10)


def test_no_cells_give_no_cells_and_a_gradient():
    for segments in (packed_segments([]), padded_segments([], 4)):
        parts = make(segments)
        out = attend(*parts, segments, causal=True)
        assert out.shape == parts[0].shape
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 0}, "window=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"query": torch.zeros(1, 4, 3, 8)}, "query [1, 4, 3, 8]"),
        ({"query": torch.zeros(1, 3, 6, 8)}, "query [1, 3, 6, 8]"),
    ],
)
def test_a_call_that_would_be_misread_is_refused(change, words):
    segments = packed_segments([4, 2])
    parts = dict(zip(("query", "key", "value"), make(segments), strict=True))
    with pytest.raises(AttentionError) as caught:
        attend(**{**parts, "segments": segments, "causal": True, **change})
    assert words in caught.value.seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_bias_may_be_all_that_has_a_gradient():
    segments = packed_segments([30, 14]).to("cuda")
    query, key, value = torch.randn(3, 1, 2, 44, 16, device="cuda")
    grads = []
    for kernel in ("block", "per_segment"):
        bias = torch.zeros(1, 1, 44, 44, device="cuda", requires_grad=True)
        attend(query, key, value, segments, causal=True, bias=bias, kernel=kernel).square().sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_what_a_card_can_do_is_known_before_its_layers_are_compiled(monkeypatch):
    asked = []
    monkeypatch.setattr(api, "_capabilities", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0))
    api.cache_device_capability(torch.device("cpu"))
    assert asked == []
    card = torch.device("cuda", 1)
    api.cache_device_capability(card)
    api.cache_device_capability(card)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert api._capability(card) == (9, 0)
    assert asked == [card]
