"""On a GPU the gradients of a small model are added all at once: a step has the same, bit by bit, and no copy is made."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.training.test_step import CASES, CUTS, gradient
from truebatch.training import step
from truebatch.training.optim.grad_accumulation import parameters_to_add
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", ["2x4", "8x1", "packed in three"])
def test_a_step_has_the_same_gradient(monkeypatch, case, cut):
    build, objective, fields, samples = CASES[case]
    found = []
    for choose in (parameters_to_add, lambda model, parameters: []):
        monkeypatch.setattr(step, "parameters_to_add", choose)
        torch.manual_seed(0)
        model = build().cuda()
        groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))], model)
        engine = StepEngine(model=model, objective=objective(), groups=groups, device=torch.device("cuda"), seed=3)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the others do not always add in the same order
                found.append(gradient(engine, CUTS[cut](samples, fields))[1])
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_it_takes_a_few_launches_and_no_copies():
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(40))).cuda()
    parameters = parameters_to_add(model, list(model.parameters()))
    assert len(parameters) == 80
    x = torch.randn(4, 16, device="cuda")
    model(x).square().sum().backward()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        step.batched_grad_accumulation(parameters),
    ):
        model(x).square().sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::_foreach_add_"] == 1
    assert counts.get("aten::add_", 0) == 0
    assert counts.get("aten::clone", 0) == 0
