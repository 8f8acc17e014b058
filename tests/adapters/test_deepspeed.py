"""DeepSpeed under the Trainer mixin: its engine sums and updates, the gradient is that of the step, one by one."""

import importlib.util
import json

import pytest
import torch
from torch import nn

from tests.adapters import zero_processes
from tests.adapters.started import run_two
from truebatch.adapters.deepspeed import deepspeed_refusals, plain_leaves

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.frozen(self.first(x)))


def test_plain_leaves_take_the_gradient_and_leave_hooks_and_gradients_alone():
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(4, 3)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    kept, called = list(model.parameters()), []
    for p in kept:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(called.append)
    with plain_leaves(model) as leaves:
        model(x).sum().backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(leaves, expected, strict=True))
    assert not called
    assert all(a is b for a, b in zip(model.parameters(), kept, strict=True))
    assert model.second.weight is model.first.weight
    assert all(p.grad is None for p in kept)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"zero_optimization": {"stage": 3}}, "stage=3"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
    ],
)
def test_what_its_engine_would_do_otherwise_is_refused(settings, word):
    ((_, seen, _),) = deepspeed_refusals(settings)
    assert word in seen
    assert not list(deepspeed_refusals({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    if not HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed")
    folder = tmp_path_factory.mktemp("zero")
    run_two("tests.adapters.zero_processes", folder)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize("stage", zero_processes.STAGES)
@pytest.mark.parametrize("case", zero_processes.CASES)
def test_the_update_of_its_engine_is_the_gradient_one_by_one(tmp_path, two, case, stage):
    expected, loss = zero_processes.first_step(tmp_path, case)
    for rank in two:
        found = rank[f"{case} {stage}"]
        assert found["wrapped"] == "DeepSpeedEngine"
        assert zero_processes.error_of(found, expected) <= 1e-6
    assert two[0][f"{case} {stage}"]["losses"] == pytest.approx([loss], rel=1e-5)


@pytest.mark.parametrize("stage", zero_processes.STAGES)
def test_memory_that_runs_out_changes_only_the_cut(tmp_path, two, stage):
    expected, _ = zero_processes.first_step(tmp_path, "causal_lm")
    for rank in two:
        assert zero_processes.error_of(rank[f"memory {stage}"], expected) <= 1e-6


@pytest.mark.parametrize("stage", zero_processes.STAGES)
def test_a_run_with_clipping_is_the_run_of_one_process_without_deepspeed(tmp_path, two, stage):
    alone = zero_processes.run(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    expected = torch.tensor(alone["gradient"], dtype=torch.float64)
    for rank in two:
        found = rank[f"run {stage}"]
        assert zero_processes.error_of(found, expected) <= 1e-5
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
    assert two[0][f"run {stage}"]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
