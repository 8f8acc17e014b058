"""Gradients that are added all at once are those that autograd adds one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.training.test_step import CASES, CUTS, engine_of, gradient
from truebatch.training import step
from truebatch.training.optim import grad_accumulation
from truebatch.training.optim.grad_accumulation import batched_grad_accumulation, parameters_to_add


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight = model[1].weight  # tied
    model[4].bias.requires_grad_(False)
    return model


def run(model, seed):
    ids = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(seed))
    model(ids).square().sum().backward()


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (found[name] is None) == (one is None), name
        assert one is None or torch.equal(found[name], one), name


@pytest.mark.parametrize("kept", [slice(None), slice(1, 3), slice(0, 0)])
def test_sums_are_the_same_bit_by_bit(kept):
    one_by_one, together = make(), make()
    for seed in range(4):
        run(one_by_one, seed)
        with batched_grad_accumulation(list(together.parameters())[kept]):
            run(together, seed)
    assert_same(gradients(together), gradients(one_by_one))


def test_the_tensor_of_a_gradient_stays_the_same():
    model = make()
    run(model, 0)
    before = [p.grad for p in model.parameters()]
    with batched_grad_accumulation(list(model.parameters())):
        run(model, 1)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_what_got_no_gradient_this_time_keeps_its_sum_and_what_got_its_first_keeps_that():
    model, wanted = make(), make()
    for each, around in ((wanted, None), (model, batched_grad_accumulation)):
        each[0](torch.tensor([1])).sum().backward()
        if around is None:
            each[1](torch.ones(4)).sum().backward()
        else:
            with around(list(each.parameters())):
                each[1](torch.ones(4)).sum().backward()
    assert_same(gradients(model), gradients(wanted))
    assert model[0].weight.grad is not None
    assert model[4].weight.grad is None


def test_sparse_gradients_are_added_too():
    wanted, found = (nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2)) for _ in range(2))
    for each in (wanted, found):
        each.weight.grad = torch.ones(5, 2)
    wanted(torch.tensor([1, 3])).sum().backward()
    with batched_grad_accumulation([found.weight]):
        found(torch.tensor([1, 3])).sum().backward()
    assert found.weight.grad.layout is torch.strided
    assert torch.equal(found.weight.grad, wanted.weight.grad)


def test_sums_that_are_sparse_stay_with_autograd():
    wanted, found = (nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2)) for _ in range(2))
    for _ in range(2):
        wanted(torch.tensor([1, 3])).sum().backward()
        with batched_grad_accumulation([found.weight]):
            found(torch.tensor([1, 3])).sum().backward()
    assert torch.equal(found.weight.grad.to_dense(), wanted.weight.grad.to_dense())


def test_a_pass_that_fails_leaves_the_sums_that_were_there():
    model = make()
    run(model, 0)
    before = gradients(model)
    model[3].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), batched_grad_accumulation(list(model.parameters())):
        run(model, 1)
    assert_same(gradients(model), before)


def on_a_card(monkeypatch):
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)


def test_on_a_card_all_of_a_small_model_are_added_together(monkeypatch):
    model = make()
    assert parameters_to_add(model, list(model.parameters())) == []
    on_a_card(monkeypatch)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [id(p) for p in parameters_to_add(model, list(model.parameters()))] == [id(p) for p in trained]


def test_those_somebody_waits_for_and_large_models_are_left_to_autograd(monkeypatch):
    model = make()
    on_a_card(monkeypatch)
    model[4].weight.register_post_accumulate_grad_hook(lambda p: None)
    chosen = parameters_to_add(model, list(model.parameters()))
    assert len(chosen) == 4
    assert all(p is not model[4].weight for p in chosen)
    monkeypatch.setattr(grad_accumulation, "MOST_BYTES", 10)
    assert parameters_to_add(model, list(model.parameters())) == []


def test_torchs_own_data_parallelism_is_left_alone(monkeypatch):
    model = make()
    on_a_card(monkeypatch)
    monkeypatch.setattr(grad_accumulation.dist, "is_initialized", lambda: True)
    assert parameters_to_add(model, list(model.parameters()))
    monkeypatch.setattr(grad_accumulation, "DistributedDataParallel", nn.Sequential)
    assert parameters_to_add(model, list(model.parameters())) == []


@pytest.mark.parametrize("cut", ["2x4", "8x1", "packed in three"])
def test_a_step_adds_them_together(monkeypatch, cut):
    build, objective, fields, samples = CASES["text"]
    batches = CUTS[cut](samples, fields)
    passes = []

    def watched(parameters):
        passes.append(len(parameters))
        return batched_grad_accumulation(parameters)

    monkeypatch.setattr(step, "batched_grad_accumulation", watched)
    found = []
    for choose in (lambda model, parameters: [], lambda model, parameters: list(parameters)):
        monkeypatch.setattr(step, "parameters_to_add", choose)
        torch.manual_seed(0)
        found.append(gradient(engine_of(build(), objective()), batches)[1])
    assert torch.equal(*found)
    assert passes[-1] > 0
    assert len(passes) == 2 * len(batches)
