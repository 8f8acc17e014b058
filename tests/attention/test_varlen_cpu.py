"""Attention inside segments as an operator for compiled models on a CPU: the same as every sample by itself."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from truebatch.attention import api, varlen_cpu
from truebatch.attention.api import attend, attend_table
from truebatch.attention.score_rule import Rule
from truebatch.attention.varlen_cpu import attend_on_host, can_attend_on_host
from truebatch.attention.varlen_static import kept_keys
from truebatch.batch.segments import packed_segments

LENGTHS = [7, 4, 4, 1, 9, 4]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()


def num_compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def make(segments, heads=4, key_heads=4, dtype=torch.float64, width=8):
    torch.manual_seed(0)
    rows, cells = segments.shape
    counts = (heads, key_heads, key_heads)
    parts = [torch.randn(rows, cells, n, width).to(dtype).transpose(1, 2) for n in counts]
    return [part.detach().requires_grad_() for part in parts]


def one_by_one(parts, lengths, causal, scale=None):
    outs = []
    for one in zip(*(part.split(lengths, dim=2) for part in parts), strict=True):
        outs.append(scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=True, scale=scale))
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shares", sorted({False, varlen_cpu.SHARES_HEADS}), ids=lambda one: f"shares_heads={one}")
def test_output_and_gradients_are_those_of_one_sample_at_a_time(heads, key_heads, causal, scale, shares, monkeypatch):
    monkeypatch.setattr(varlen_cpu, "SHARES_HEADS", shares)
    segments = packed_segments(LENGTHS, slots=11)
    parts = make(segments, heads, key_heads)
    compiled = torch.compile(attend_table, backend="aot_eager", fullgraph=True, dynamic=False)
    found = compiled(*parts, segments.starts, Rule(causal=causal, scale=scale), max_length=9)
    wanted = one_by_one(parts, LENGTHS, causal, scale)
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    pairs = zip(torch.autograd.grad(found, parts, grad), torch.autograd.grad(wanted, parts, grad), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_it_is_the_kernel_that_is_called_as_written(dtype, key_heads):
    segments = packed_segments(LENGTHS)
    parts = make(segments, 4, key_heads, dtype=dtype)
    force_eager = attend(*parts, segments, causal=True, kernel="per_segment")
    compiled = torch.compile(attend_table, backend="aot_eager", fullgraph=True, dynamic=False)
    found = compiled(*parts, segments.starts, Rule(causal=True), max_length=9)
    grad = torch.randn_like(found)
    assert torch.equal(found, force_eager)
    pairs = zip(torch.autograd.grad(found, parts, grad), torch.autograd.grad(force_eager, parts, grad), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)


def test_rows_of_other_lengths_compile_nothing_again():
    compiled = torch.compile(attend_table, backend="aot_eager", fullgraph=True, dynamic=False)
    tables = [[5, 4], [9], [1] * 9, [3, 3, 3], [2, 6, 1]]
    before = num_compilations()
    for lengths in tables:
        segments = packed_segments(lengths, cells=9, slots=12, max_length=9)
        parts = make(segments)
        found = compiled(*parts, segments.starts, Rule(causal=True), max_length=9)
        torch.testing.assert_close(found, one_by_one(parts, lengths, True), atol=1e-12, rtol=1e-12)
        found.sum().backward()
    assert num_compilations() == before + 1


def test_nothing_of_one_sample_reaches_another():
    segments = packed_segments([3, 4, 2])
    parts = make(segments)
    with torch.no_grad():
        parts[1][:, :, 3:7] = float("nan")
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    found = attend_on_host(*flat, segments.starts, causal=False, scale=1.0)
    assert not found[[0, 1, 2, 7, 8]].isnan().any()
    grads = torch.autograd.grad(found[[0, 1, 2, 7, 8]].sum(), parts)
    assert not any(grad[:, :, [0, 1, 2, 7, 8]].isnan().any() for grad in grads)


def test_numbers_that_lie_in_another_order_are_the_same_numbers():
    segments = packed_segments([3, 4], slots=4)
    flat = [part.transpose(1, 2).flatten(0, 1).detach().requires_grad_() for part in make(segments)]
    turned = [part.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for part in flat]
    assert turned[0].stride(-1) != 1
    found, other = (attend_on_host(*parts, segments.starts, causal=True, scale=0.5) for parts in (flat, turned))
    assert torch.equal(found, other)
    grad = torch.randn_like(found)
    grads = zip(torch.autograd.grad(found, flat, grad), torch.autograd.grad(other, turned, grad), strict=True)
    assert all(torch.equal(one, two) for one, two in grads)


def test_cells_that_a_table_leaves_out_are_zero_and_reach_nothing():
    parts = [part.transpose(1, 2).flatten(0, 1) for part in make(packed_segments([6]))]
    found = attend_on_host(*parts, torch.tensor([1, 3, 5]), causal=False, scale=1.0)
    grads = torch.autograd.grad(found.sum(), parts)
    for one in (found, *grads):
        assert one[[0, 5]].eq(0).all()
    assert found[1:5].ne(0).all()


def test_the_operator_keeps_torch_s_rules_and_notes_its_keys():
    segments = packed_segments([3, 2, 2], slots=5)
    flat = [part.transpose(1, 2).flatten(0, 1).detach() for part in make(segments, 4, 2)]
    operator = torch.ops.truebatch.attend_on_host.default
    torch.library.opcheck(operator, (*flat, segments.starts, segments.starts[:1], [1.0, 0.5]))
    with kept_keys() as kept:
        attend_on_host(*flat, segments.starts, causal=True, scale=0.5)
    assert [torch.equal(kept[0][i], flat[i + 1]) for i in range(2)] == [True, True]


@pytest.mark.parametrize(
    "rule",
    [
        Rule(causal=True, window=2),
        Rule(causal=True, dropout=0.5),
        Rule(causal=True, softcap=3.0),
        Rule(causal=True, bias=torch.zeros(1, 1, 7, 7, dtype=torch.float64)),
        Rule(causal=True, sinks=torch.zeros(4, dtype=torch.float64)),
    ],
    ids=["window", "dropout", "softcap", "bias", "sinks"],
)
def test_what_the_kernel_does_not_know_goes_through_a_mask(monkeypatch, rule):
    segments = packed_segments([4, 3])
    parts, called = make(segments), []
    real = api._block_table
    monkeypatch.setattr(api, "_block_table", lambda *a: called.append(1) or real(*a))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert attend_table(*parts, segments.starts, rule, max_length=4).shape == parts[0].shape
    assert called == [1]


def test_values_of_another_width_or_precision_go_through_a_mask():
    query, key, value = torch.zeros(3, 1, 2, 5, 8)
    assert can_attend_on_host(query, key, value)
    assert not can_attend_on_host(query, key, value[..., :4])
    assert not can_attend_on_host(query, key, value.double())
    assert not can_attend_on_host(query.to("meta"), key.to("meta"), value.to("meta"))


@pytest.mark.parametrize("window", [None, 3])
def test_compiled_attend_reads_no_length_and_lets_nothing_out_of_padding(window):
    compiled = torch.compile(
        lambda q, k, v, s: attend(q, k, v, s, causal=True, window=window),
        backend="aot_eager", fullgraph=True, dynamic=False,
    )  # fmt: skip
    before = num_compilations()
    for lengths in ([5, 4], [9], [1] * 9, [3, 2], [2, 6, 1], [4, 1, 1]):
        segments = packed_segments(lengths, cells=12, slots=14)
        parts, used = make(segments), sum(lengths)
        with torch.no_grad():
            for part in parts:
                part[:, :, used:] = float("nan")
        found = compiled(*parts, segments)
        wanted = attend(*parts, segments, causal=True, window=window, kernel="per_segment")
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
        grad = torch.randn_like(found)
        pairs = zip(torch.autograd.grad(found, parts, grad), torch.autograd.grad(wanted, parts, grad), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)  # zeros in padding
    assert num_compilations() == before + 1
