"""Attention through plans that are kept, with cuDNN and torch's kernel replaced by formulas written out."""

from __future__ import annotations

import pytest
import torch

from tests.tensors.test_fixedtable import (
    assert_inside_segments,
    count_compilations,
    make,
    stand_in_backward,
    stand_in_forward,
)
from truebatch.tensors import cudnnplans, planned
from truebatch.tensors.attention import attend
from truebatch.tensors.cudnnplans import backward_plan, fill_slots, forward_plan, plans_are_possible, shape_of
from truebatch.tensors.fixedtable import KernelCall, table_bounds
from truebatch.tensors.planned import attend_by_plan
from truebatch.tensors.segments import packed_segments


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


@pytest.fixture(params=["planned", "refused", "refused backward"])
def kernel(monkeypatch, request):
    """cuDNN's kernels, or a cuDNN that has none for the shape."""

    def forward(plan, query, key, value, starts):
        out, _ = stand_in_forward(query, key, value, plan.call(starts))
        return out, query.new_zeros(query.shape[:2])

    def backward(plan, grad, query, key, value, out, stats, starts):
        assert stats.shape == query.shape[:2]
        return stand_in_backward(grad, query, key, value, out, None, plan.call(starts))

    made = {"forward_plan": request.param != "refused", "backward_plan": request.param == "planned"}
    for name, is_made in made.items():
        monkeypatch.setattr(planned, name, lambda shape, cells=0, there=is_made: StandIn(shape) if there else None)
    monkeypatch.setattr(planned, "attend_planned", forward)
    monkeypatch.setattr(planned, "differentiate_planned", backward)
    monkeypatch.setattr(planned, "flash_forward", stand_in_forward)
    monkeypatch.setattr(planned, "flash_backward", stand_in_backward)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[50, 40, 9, 8, 2, 1], [3, 50, 1, 7], [5], [1] * 17])
def test_attention_by_plan_is_attention_inside_segments(kernel, lengths, causal):
    segments = packed_segments(lengths, cells=sum(lengths) + 7, slots=24)
    table = (segments.starts, table_bounds(segments))
    assert_inside_segments(segments, causal, lambda parts: attend_by_plan(*parts, *table, causal=causal, scale=0.4))


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
    arguments = (*make(18), segments.starts, table_bounds(segments), [1.0, 0.5])
    torch.library.opcheck(torch.ops.truebatch.attend_by_plan.default, arguments)


def test_an_old_cudnn_is_not_asked(monkeypatch):
    class Old:
        @staticmethod
        def backend_version():
            return 90500

    monkeypatch.setattr(cudnnplans.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(cudnnplans.importlib, "import_module", lambda _: Old)
    cudnnplans._library.cache_clear()
    try:
        assert not plans_are_possible()
    finally:
        cudnnplans._library.cache_clear()


def test_further_slots_are_empty():
    starts = fill_slots(torch.tensor([0, 4, 9, 9]), 2)
    assert starts.tolist() == [0, 4, *[9] * 15]


@pytest.mark.skipif(not (torch.cuda.is_available() and plans_are_possible()), reason="needs a card and cuDNN's package")
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
