"""Attention through plans that are kept, with cuDNN and torch's kernel replaced by formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.test_varlen_static import (
    assert_inside_segments,
    count_compilations,
    make,
    stand_in_backward,
    stand_in_forward,
)
from truebatch.attention import api, cudnn_graph, cudnn_op
from truebatch.attention.api import attend
from truebatch.attention.cudnn_graph import backward_plan, fill_slots, forward_plan, plans_are_possible, shape_of
from truebatch.attention.cudnn_op import attend_by_plan, attend_rows_by_plan
from truebatch.attention.varlen_static import KernelCall, read_bounds
from truebatch.batch.segments import SHORT, packed_segments, stack_rows, table_segments
from truebatch.errors import AttentionError


class StandIn:
    """A plan: remembers what it was made for, refuses what lies outside."""

    def __init__(self, shape):
        self.slots, self.longest = shape.slots, shape.longest
        self.causal, self.scale = shape.causal, shape.scale

    def call(self, starts):
        lengths = starts.diff()
        assert len(lengths) == self.slots
        assert int(lengths.max()) <= self.longest
        longest = max(int(lengths.max()), 2)
        return KernelCall(starts, longest, self.causal, -1, 0 if self.causal else -1, self.scale)


def by_address(part):
    """What cuDNN finds at the address of a part, whatever its shape: [cells, H, D], dense."""
    heads, width = part.shape[1], part.shape[-1]
    return part.as_strided((part.numel() // (heads * width), heads, width), (heads * width, width, 1))


@pytest.fixture(params=["planned", "refused", "refused backward"])
def kernel(monkeypatch, request):
    """cuDNN's kernels, or a cuDNN that has none for the shape."""

    def forward(plan, parts, starts, *, out, stats):
        by_address(out).copy_(stand_in_forward(*map(by_address, parts), plan.call(starts))[0])
        stats.zero_()

    def backward(plan, grad, parts, starts, *, out, stats, grads):
        query, key, value = map(by_address, parts)
        assert stats.shape == query.shape[:2]
        given = (by_address(grad), query, key, value, by_address(out), None)
        for one, found in zip(grads, stand_in_backward(*given, plan.call(starts)), strict=True):
            by_address(one).copy_(found)

    made = {"forward_plan": request.param != "refused", "backward_plan": request.param == "planned"}
    for name, is_made in made.items():
        monkeypatch.setattr(cudnn_op, name, lambda shape, cells=0, there=is_made: StandIn(shape) if there else None)
    monkeypatch.setattr(cudnn_op, "attend_planned", forward)
    monkeypatch.setattr(cudnn_op, "differentiate_planned", backward)
    monkeypatch.setattr(cudnn_op, "table_of", lambda plan, starts, used: fill_slots(starts, used))
    monkeypatch.setattr(cudnn_op, "flash_forward", stand_in_forward)
    monkeypatch.setattr(cudnn_op, "flash_backward", stand_in_backward)
    return request.param


def by_rows(parts, starts, bounds, *, causal, rows=1):
    """`attend_rows_by_plan` between [cells, H, D]."""
    lying = [part.unflatten(0, (rows, -1)).transpose(1, 2) for part in parts]
    out = attend_rows_by_plan(*lying, starts, read_bounds(bounds), causal=causal, scale=0.4)
    return out.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[50, 40, 9, 8, 2, 1], [3, 50, 1, 7], [5], [1] * 17])
@pytest.mark.parametrize("way", ["operator", "as written"])
def test_attention_by_plan_is_attention_inside_segments(kernel, lengths, causal, way):
    segments = packed_segments(lengths, cells=sum(lengths) + 7, slots=24)
    table = (segments.starts, segments.bounds_tensor)
    ways = {
        "operator": lambda parts: attend_by_plan(*parts, *table, causal=causal, scale=0.4),
        "as written": lambda parts: by_rows(parts, *table, causal=causal),
    }
    assert_inside_segments(segments, causal, ways[way])


def test_several_rows_are_attended_as_written(kernel):
    segments = stack_rows([packed_segments([9, 1], cells=12), packed_segments([12], cells=12)])
    table = (segments.starts, segments.bounds_tensor)
    assert_inside_segments(segments, True, lambda parts: by_rows(parts, *table, causal=True, rows=2))


def test_attention_as_written_takes_the_short_way_and_others_the_operator(kernel, monkeypatch):
    asked = []
    short_way = api.attend_rows_by_plan
    monkeypatch.setattr(api, "attend_rows_by_plan", lambda *a, **k: asked.append(1) or short_way(*a, **k))
    segments = packed_segments([9, 8, 1])
    for width, is_short in ((8, True), (10, False)):
        asked.clear()
        parts = [torch.randn(1, 2, 18, width) for _ in range(3)]
        wanted = attend(*parts, segments, causal=True)
        torch.testing.assert_close(attend(*parts, segments, causal=True, kernel="planned"), wanted)
        assert bool(asked) == is_short


class ShortKernels:
    """Stand-ins for the kernels of short samples; `served` says how many cells they were given."""

    def __init__(self):
        self.served = []

    def span_of_cells(self, starts, cells):
        assert int(starts[0]) == 0
        assert int(starts[-1]) == cells
        return starts

    def _call(self, starts, causal, scale):
        longest = max(int(starts.diff().max()), 2)
        return KernelCall(starts, longest, causal, -1, 0 if causal else -1, scale)

    def attend_short(self, parts, span, *, causal, scale, out, stats):
        self.served.append(len(parts[0]))
        out.copy_(stand_in_forward(*parts, self._call(span, causal, scale))[0])
        stats.zero_()

    def differentiate_short(self, grad, parts, span, *, causal, scale, out, stats, grads):
        found = stand_in_backward(grad, *parts, out, None, self._call(span, causal, scale))
        for one, other in zip(grads, found, strict=True):
            one.copy_(other)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths", "short"),
    [([300, 260, 9, 8, 2], 26), ([9, 300, 40, 1], 48), ([40, 30, 20], 97), ([300, 260], 7), ([3, 0, 300, 0, 4], 11)],
)
def test_short_samples_behind_the_long_ones_have_kernels_of_their_own(
    kernel, monkeypatch, lengths, short, causal, compiled
):
    kernels = ShortKernels()
    monkeypatch.setattr(cudnn_op, "_short_kernels", lambda device: kernels)
    monkeypatch.setattr(cudnn_op, "LEAST_SHORT_WORK", 1)
    segments = packed_segments(lengths, cells=sum(lengths) + 7, slots=24)
    table = (segments.starts, segments.bounds_tensor)

    def run(parts):
        if not compiled:
            return by_rows(parts, *table, causal=causal)
        return torch.compile(attend_by_plan, backend="eager")(*parts, *table, causal=causal, scale=0.4)

    torch.compiler.reset()
    assert_inside_segments(segments, causal, run)
    is_left_to_torch = kernel == "refused" and max(lengths) > SHORT
    assert kernels.served == ([] if is_left_to_torch else [short])


@pytest.mark.parametrize("fault", [RuntimeError("Failed to find C compiler"), ImportError("no such name")])
def test_where_triton_does_not_work_long_kernels_serve_all_and_it_is_said_once(kernel, monkeypatch, caplog, fault):
    asked = []

    def fail(name):
        asked.append(name)
        raise fault

    monkeypatch.setattr(cudnn_op.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(cudnn_op.importlib, "import_module", fail)
    monkeypatch.setattr(cudnn_op, "LEAST_SHORT_WORK", 1)
    cudnn_op._short_kernels.cache_clear()
    segments = packed_segments([300, 40, 30])
    try:
        for _ in range(2):
            assert_inside_segments(
                segments, True, lambda parts: by_rows(parts, segments.starts, segments.bounds_tensor, causal=True)
            )
    finally:
        cudnn_op._short_kernels.cache_clear()
    assert asked == ["truebatch.attention.triton_short"]
    assert [str(fault) in record.getMessage() for record in caplog.records] == [True]


def test_few_short_samples_are_not_worth_a_launch(kernel, monkeypatch):
    kernels = ShortKernels()
    monkeypatch.setattr(cudnn_op, "_short_kernels", lambda device: kernels)
    segments = packed_segments([300, 40, 30])
    assert_inside_segments(
        segments,
        True,
        lambda parts: attend_by_plan(*parts, segments.starts, segments.bounds_tensor, causal=True, scale=0.4),
    )
    assert kernels.served == []


def test_what_is_made_of_a_table_is_made_once_and_again_when_the_table_has_changed(kernel, monkeypatch):
    made = []
    monkeypatch.setattr(
        cudnn_op, "table_of", lambda plan, starts, used: made.append(starts.tolist()) or fill_slots(starts, used)
    )
    segments = packed_segments([9, 8, 1])
    parts, starts = make(18), segments.starts

    def attend_now(bounds):
        attend_by_plan(*parts, starts, bounds, causal=True, scale=0.4)

    for _ in range(3):
        attend_now(segments.bounds_tensor)
    once = len(made)
    starts.copy_(packed_segments([3, 5, 10]).starts)
    attend_now(packed_segments([3, 5, 10]).bounds_tensor)
    assert once <= 1
    assert len(made) == 2 * once
    with torch.inference_mode():
        starts = starts.clone()  # has no version: never taken for known
        attend_now(packed_segments([3, 5, 10]).bounds_tensor)
        starts.copy_(packed_segments([9, 8, 1]).starts)
        attend_now(segments.bounds_tensor)
    assert len(made) == 4 * once


def test_a_row_met_in_inference_mode_first_is_trained_afterwards(kernel):
    """What is remembered of lengths are numbers: a tensor made in inference mode could not be kept for a gradient."""
    lengths = [11, 7, 3]
    with torch.inference_mode():
        attend(*(torch.randn(1, 2, 21, 8) for _ in range(3)), packed_segments(lengths), causal=True, kernel="planned")
    for width in (8, 10):  # as written, and through the operator
        parts = [torch.randn(1, 2, 21, width, requires_grad=True) for _ in range(3)]
        attend(*parts, packed_segments(lengths), causal=True, kernel="planned").sum().backward()
        assert all(part.grad is not None for part in parts)


def test_a_bare_table_may_have_empty_segments_among_the_others(kernel):
    starts = torch.tensor([0, 5, 5, 8, 10])
    parts = [torch.randn(1, 2, 10, 8) for _ in range(3)]
    found = attend(*parts, table_segments(starts, shape=(1, 10), max_length=5), causal=True, kernel="planned")
    torch.testing.assert_close(found, attend(*parts, packed_segments([5, 3, 2]), causal=True))


def test_who_watches_operations_sees_one_operator(kernel):
    """Selective checkpointing counts operations: a table that is made in the first pass only would shift them."""
    segments = packed_segments([9, 8, 1])
    parts = [torch.randn(1, 2, 18, 8, requires_grad=True) for _ in range(3)]
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        out = attend(*parts, segments, causal=True, kernel="planned")
    assert any("attend_by_plan" in name for name in seen)
    torch.testing.assert_close(out, attend(*parts, segments, causal=True))


def test_different_precisions_are_refused(kernel):
    parts = [torch.randn(1, 2, 18, 8, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float64)]
    with pytest.raises(AttentionError, match="different precisions"):
        attend(*parts, packed_segments([9, 9]), causal=True, kernel="planned")


def test_a_gradient_of_a_gradient_is_refused_rather_than_wrong(kernel):
    segments = packed_segments([9, 8, 1])
    parts = make(18)
    out = by_rows(parts, segments.starts, segments.bounds_tensor, causal=True)
    (first,) = torch.autograd.grad(out.sin().sum(), parts[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate"):
        first.sin().sum().backward()


def test_heads_of_any_width_go_through_plans(kernel):
    lengths = [6, 3]
    chance = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, heads, 9, width, generator=chance) for heads, width in ((4, 10), (2, 10), (2, 6))]
    segments = packed_segments(lengths)
    want = attend(*parts, segments, causal=True)
    torch.testing.assert_close(attend(*parts, segments, causal=True, kernel="planned"), want)


def test_one_compilation_serves_every_row_of_one_shape(kernel):
    assert count_compilations({"planned": True}) == 1


def test_a_compiled_model_may_ask_whether_plans_are_possible():
    compiled = torch.compile(lambda x: x + plans_are_possible(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == float(plans_are_possible())


def test_the_operators_are_registered_as_torch_wants_them(kernel):
    segments = packed_segments([9, 8, 1], slots=8)
    parts = [part.detach() for part in make(18)]  # a function of autograd ties them together
    table = (segments.starts, segments.bounds_tensor, [1.0, 0.5])
    torch.library.opcheck(torch.ops.truebatch.attend_by_plan.default, (*parts, *table))
    results = torch.ops.truebatch.attend_by_plan(*parts, *table)
    torch.library.opcheck(torch.ops.truebatch.attend_by_plan_backward.default, (parts[0], *parts, *results, *table))


def test_an_old_cudnn_is_not_asked(monkeypatch):
    class Old:
        @staticmethod
        def backend_version():
            return 90500

    monkeypatch.setattr(cudnn_graph.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(cudnn_graph.importlib, "import_module", lambda _: Old)
    cudnn_graph._library.cache_clear()
    try:
        assert not plans_are_possible()
    finally:
        cudnn_graph._library.cache_clear()


def test_further_slots_are_empty():
    starts = fill_slots(torch.tensor([0, 4, 9, 9]), 2)
    assert starts.tolist() == [0, 4, *[9] * 15]


@pytest.mark.skipif(not (torch.cuda.is_available() and plans_are_possible()), reason="needs a GPU and cuDNN's package")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [32, 64, 80, 128])
def test_plans_of_cudnn_on_this_card(causal, width):
    lengths = [700, 129, 128, 127, 64, 33, 8, 2, 1]
    segments = packed_segments(lengths).to("cuda")
    chance = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(1, heads, sum(lengths), width) for heads in (8, 2, 2)]
    parts = [torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=chance).requires_grad_() for s in shapes]
    query = parts[0].transpose(1, 2).reshape(-1, 8, width)
    shape = shape_of(query, parts[1][0].transpose(0, 1), used=9, longest=700, causal=causal, scale=0.1)
    assert forward_plan(shape) is not None
    assert backward_plan(shape, cells=len(query)) is not None
    results = []
    for kernel in ("planned", "per_segment"):
        wide = parts if kernel == "planned" else [part.detach().double().requires_grad_() for part in parts]
        out = attend(*wide, segments, causal=causal, kernel=kernel)
        grads = torch.autograd.grad((out * torch.linspace(-1, 1, width, device="cuda")).sum(), wide)
        results.append([out, *grads])
    for one, other in zip(*results, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.01
