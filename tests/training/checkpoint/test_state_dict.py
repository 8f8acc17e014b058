"""State goes out by name and comes back bit for bit; a changed model is named, not guessed at."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.training.checkpoint.test_pytree import equal
from truebatch.errors import CheckpointError
from truebatch.training.checkpoint.state_dict import (
    optimiser_state,
    optimisers_state,
    restore_optimiser,
    restore_optimisers,
    restore_schedule,
    schedule_state,
)  # fmt: skip
from truebatch.training.checkpoint.store import Checkpoint, load_newest, save_checkpoint
from truebatch.training.random_state import random_state, restore_random


class Nested(torch.optim.Optimizer):
    """An optimiser with nested state of several dtypes, as Adafactor-like ones have."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "betas": (0.9, None), "name": "嵌套"})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("count", torch.zeros((), dtype=torch.int64)).add_(1)
                rows = state.setdefault("factors", {"rows": torch.zeros(len(p), dtype=torch.float64), "list": [0.5]})
                rows["rows"].add_(p.grad.double().flatten(1).sum(1) if p.ndim > 1 else p.grad.double())
                rows["list"].append(float(rows["rows"][0]))
                state["history"] = (*state.get("history", ()), p.grad.detach().clone())
                p.data.sub_(group["lr"] * p.grad)


OPTIMISERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9)),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "nested": Nested,
}


def build(kind: str, *, seed: int = 0, dtype=torch.float32, backwards: bool = False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2][:: -1 if backwards else 1], "lr": 0.05}, {"params": parameters[2:]}]
    return model, OPTIMISERS[kind](groups)


def train(model, optimiser, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(5, 4, generator=generator).to(next(model.parameters()).dtype)
        optimiser.zero_grad()
        model(inputs).square().sum().backward()
        optimiser.step()


def save_and_load(parts, folder):
    save_checkpoint(folder, Checkpoint(1, parts))
    return load_newest(folder).checkpoint.parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OPTIMISERS)
def test_an_optimiser_goes_on_bit_for_bit(kind, dtype, tmp_path):
    model, optimiser = build(kind, dtype=dtype)
    train(model, optimiser, 3, seed=1)
    state = optimiser_state(optimiser, model.named_parameters())
    parts = save_and_load({"model": model.state_dict(), "optimiser": state}, tmp_path)
    assert equal(state, parts["optimiser"])
    # In another order of parameters: names decide, not positions.
    other, restored = build(kind, seed=9, dtype=dtype, backwards=True)
    other.load_state_dict(parts["model"])
    restore_optimiser(restored, parts["optimiser"], other.named_parameters())
    train(model, optimiser, 3, seed=2)
    train(other, restored, 3, seed=2)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))
    after, again = (optimiser_state(o, m.named_parameters()) for o, m in ((optimiser, model), (restored, other)))
    assert all(equal(after["state"][name], again["state"][name]) for name in after["state"])


def test_moments_wider_than_the_weights_keep_their_bits(tmp_path):
    model, optimiser = build("adamw", dtype=torch.bfloat16)
    train(model, optimiser, 1, seed=1)
    for values in optimiser.state.values():
        values["exp_avg"] = torch.randn(values["exp_avg"].shape, dtype=torch.float32)
    parts = save_and_load({"optimiser": optimiser_state(optimiser, model.named_parameters())}, tmp_path)
    other, restored = build("adamw", dtype=torch.bfloat16)
    restore_optimiser(restored, parts["optimiser"], other.named_parameters())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert restored.state[theirs]["exp_avg"].dtype == torch.float32
        assert torch.equal(restored.state[theirs]["exp_avg"], optimiser.state[mine]["exp_avg"])


def test_a_changed_learning_rate_comes_back_and_the_checkpoint_is_not_shared(tmp_path):
    model, optimiser = build("momentum")
    train(model, optimiser, 1, seed=1)
    optimiser.param_groups[0]["lr"] = 0.0123
    state = optimiser_state(optimiser, model.named_parameters())
    other, restored = build("momentum")
    restore_optimiser(restored, state, other.named_parameters())
    assert [group["lr"] for group in restored.param_groups] == [0.0123, 0.1]
    kept = {name: values["momentum_buffer"].clone() for name, values in state["state"].items()}
    train(other, restored, 2, seed=5)
    assert all(torch.equal(kept[name], state["state"][name]["momentum_buffer"]) for name in kept)


def test_several_optimisers_keep_their_own_state(tmp_path):
    def both():
        model, first = build("adamw")
        return model, {
            "generator": first,
            "discriminator": torch.optim.SGD(model[1].parameters(), lr=1.0, momentum=0.5),
        }

    model, optimisers = both()
    for optimiser in optimisers.values():
        train(model, optimiser, 2, seed=3)
    states = optimisers_state(optimisers, model.named_parameters())
    parts = save_and_load({"optimiser": states}, tmp_path)
    other, restored = both()
    restore_optimisers(restored, parts["optimiser"], other.named_parameters())
    assert equal(optimisers_state(restored, other.named_parameters()), states)
    with pytest.raises(CheckpointError, match="generator"):
        restore_optimisers({"generator": restored["generator"]}, parts["optimiser"], other.named_parameters())


def test_a_changed_model_is_named_by_its_parameter():
    model, optimiser = build("adamw")
    state = optimiser_state(optimiser, model.named_parameters())
    wider = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    groups = [{"params": list(wider[0].parameters())}, {"params": list(wider[1].parameters())}]
    with pytest.raises(CheckpointError, match=r"1\.bias: shape \[2\] in the checkpoint, \[5\] here"):
        restore_optimiser(torch.optim.AdamW(groups), state, wider.named_parameters())
    fewer = list(model.named_parameters())[:3]
    with pytest.raises(CheckpointError, match=r"1\.bias: shape \[2\] in the checkpoint, absent here"):
        restore_optimiser(torch.optim.AdamW([p for _, p in fewer]), state, fewer)
    with pytest.raises(CheckpointError, match="saved: AdamW; here: SGD"):
        restore_optimiser(torch.optim.SGD(model.parameters()), state, model.named_parameters())
    with pytest.raises(CheckpointError, match="parameter groups"):
        restore_optimiser(torch.optim.AdamW(model.parameters()), state, model.named_parameters())
    with pytest.raises(CheckpointError, match="without a name"):
        optimiser_state(optimiser, list(model.named_parameters())[1:])


SCHEDULES = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "chain": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(kind, tmp_path):
    def advance(schedule, optimiser, steps):
        rates = []
        for step in steps:
            optimiser.step()
            schedule.step(*([float(step)] if kind == "plateau" else []))
            rates.append([group["lr"] for group in optimiser.param_groups])
        return rates

    model, optimiser = build("momentum")
    train(model, optimiser, 1, seed=0)
    schedule = SCHEDULES[kind](optimiser)
    advance(schedule, optimiser, range(2))
    parts = save_and_load(
        {"optimiser": optimiser_state(optimiser, model.named_parameters()), "schedule": schedule_state(schedule)},
        tmp_path,
    )
    other, restored = build("momentum")
    train(other, restored, 1, seed=0)
    second = SCHEDULES[kind](restored)
    restore_optimiser(restored, parts["optimiser"], other.named_parameters())
    restore_schedule(second, parts["schedule"])
    assert advance(second, restored, range(2, 9)) == advance(schedule, optimiser, range(2, 9))


def test_a_scaler_keeps_its_scale_and_another_kind_is_refused(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0**7)
    scaler.scale(torch.ones(1))
    parts = save_and_load({"scaler": schedule_state(scaler)}, tmp_path)
    other = torch.amp.GradScaler("cpu")
    restore_schedule(other, parts["scaler"])
    other.scale(torch.ones(1))
    assert other.state_dict() == scaler.state_dict()
    with pytest.raises(CheckpointError, match="fields of the schedule"):
        restore_schedule(torch.amp.GradScaler("cpu", enabled=False), parts["scaler"])
    _, optimiser = build("sgd")
    with pytest.raises(CheckpointError, match="GradScaler"):
        restore_schedule(torch.optim.lr_scheduler.StepLR(optimiser, 1), parts["scaler"])


def draw() -> list[object]:
    return [random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(3).tolist(), random.random()]


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), num=st.integers(0, 5))
def test_random_generators_go_on_as_if_nothing_had_happened(seed, num, tmp_path_factory):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(num):
        draw()
    parts = save_and_load({"rng": random_state()}, tmp_path_factory.mktemp("rng"))
    expected = [draw() for _ in range(3)]
    assert restore_random(parts["rng"]) == ()
    assert [draw() for _ in range(3)] == expected


def test_generators_that_are_not_here_are_told():
    state = {**random_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)}
    if torch.cuda.device_count():
        state["cuda"] = [*torch.cuda.get_rng_state_all(), torch.zeros(16, dtype=torch.uint8)]
    assert "devices are here" in restore_random(state)[0]


@pytest.mark.gpu
def test_state_on_a_gpu_comes_back_there_bit_for_bit(tmp_path):
    model, optimiser = build("adamw")
    model.cuda()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        model(torch.randn(5, 4, device="cuda")).square().sum().backward()
        optimiser.step()
    state = optimiser_state(optimiser, model.named_parameters())
    parts = save_and_load({"optimiser": state, "rng": random_state()}, tmp_path)
    expected = torch.randn(4, device="cuda")
    other = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    restore_optimiser(other, parts["optimiser"], model.named_parameters())
    for parameter in model.parameters():
        for name, value in optimiser.state[parameter].items():
            assert other.state[parameter][name].device == value.device
            assert torch.equal(other.state[parameter][name], value)
    assert restore_random(parts["rng"]) == ()
    assert torch.equal(torch.randn(4, device="cuda"), expected)
