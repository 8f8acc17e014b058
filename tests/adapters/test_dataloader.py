"""A plain loop with torch's DataLoader: epochs, ranks and resuming, in the words of a user."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch.utils.data import DataLoader

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.adapters import dataloader
from truebatch.adapters.dataloader import whole_steps
from truebatch.adapters.step_loss import step_loss
from truebatch.data.torch_dataloader import batch_sampler, collate_fn, planned_samples
from truebatch.errors import BatchError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan

SAMPLES = text_samples([3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2])
LENGTHS = [len(sample["input_ids"]) for sample in SAMPLES]


def steps_of(epoch, *, layout="padded", workers=0, **place):
    plan = build_plan(LENGTHS, PlanConfig(layout=layout, samples_per_step=4, cells=40), epoch=epoch)
    loader = DataLoader(
        planned_samples(SAMPLES, epoch=epoch),
        batch_sampler=batch_sampler(plan, **place),
        collate_fn=collate_fn(TEXT_FIELDS),
        num_workers=workers,
    )
    return whole_steps(loader, plan, **place)


def train(model, start=(0, 0), *, epochs=3, stop=None, layout="padded", workers=0):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, places = [], []
    for epoch in range(start[0], epochs):
        first = start[1] if epoch == start[0] else 0
        for step in steps_of(epoch, layout=layout, workers=workers, start_step=first):
            if (epoch, step.number) == stop:
                return losses, places
            loss = step_loss(model, NextToken(), step, epoch=epoch)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
            places.append((epoch, [i for batch in step for i in batch.sample_ids]))
    return losses, places


def new_model():
    torch.manual_seed(0)
    return TextModel()


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(dataloader).attempted > 10
    assert doctest.testmod(dataloader).failed == 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_every_epoch_has_every_sample_once_in_an_order_of_its_own(layout):
    _, places = train(new_model(), layout=layout)
    epochs = [[i for epoch, ids in places if epoch == e for i in ids] for e in range(3)]
    assert all(sorted(ids) == list(range(len(SAMPLES))) for ids in epochs)
    assert len({tuple(ids) for ids in epochs}) == 3


@pytest.mark.parametrize("stop", [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_a_loop_that_goes_on_ends_with_the_same_bits(stop):
    whole, parts = new_model(), new_model()
    losses, _ = train(whole)
    before, _ = train(parts, stop=stop)
    after, _ = train(parts, start=stop, workers=2 if stop == (1, 2) else 0)
    assert before + after == losses
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def test_ranks_share_the_samples_of_every_step():
    alone = [sorted(i for batch in step for i in batch.sample_ids) for step in steps_of(1)]
    ranks = [list(steps_of(1, rank=r, ranks=3)) for r in range(3)]
    shared = [
        sorted(i for step in steps for batch in step for i in batch.sample_ids) for steps in zip(*ranks, strict=True)
    ]
    assert shared == alone
    assert len({len(step) for step in next(zip(*ranks, strict=True))}) == 1


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_loss_of_a_step_has_the_gradient_of_its_samples_one_by_one(layout):
    model = new_model()
    plan = build_plan(LENGTHS, PlanConfig(samples_per_step=1, samples=1))
    singles = {
        step.batches[0].sample_ids[0]: step.batches[0]
        for step in whole_steps(
            DataLoader(planned_samples(SAMPLES), batch_sampler=batch_sampler(plan), collate_fn=collate_fn(TEXT_FIELDS)),
            plan,
        )
    }
    for step in steps_of(0, layout=layout):
        model.zero_grad()
        loss = step_loss(model, NextToken(), step)
        loss.backward()
        found = gradient(model)
        model.zero_grad()
        alone = [singles[i] for batch in step for i in batch.sample_ids]
        true = sum(NextToken().sums(model, b)["nll"] for b in alone) / sum(NextToken().counts(b)["nll"] for b in alone)
        true.backward()
        assert float((found - gradient(model)).norm() / gradient(model).norm()) <= 1e-6
        assert loss.item() == pytest.approx(true.item(), rel=1e-6)


def test_the_loss_of_a_step_can_be_scaled_and_leaves_gradients_that_were_there():
    model = new_model()
    step = next(steps_of(0))
    step_loss(model, NextToken(), step).backward()
    once = gradient(model).clone()
    loss = step_loss(model, NextToken(), step)
    assert torch.equal(gradient(model), once)
    (loss * 3).backward()
    torch.testing.assert_close(gradient(model), 4 * once)


def test_a_second_backward_is_refused():
    loss = step_loss(new_model(), NextToken(), next(steps_of(0)))
    loss.backward(retain_graph=True)
    with pytest.raises(BatchError, match="twice"):
        loss.backward()


def test_a_loader_of_another_plan_is_refused():
    plan, other = (build_plan(LENGTHS, PlanConfig(samples_per_step=4), epoch=e) for e in range(2))
    loader = DataLoader(planned_samples(SAMPLES), batch_sampler=batch_sampler(plan), collate_fn=collate_fn(TEXT_FIELDS))
    with pytest.raises(BatchError, match="does not give the micro-batches of step 0"):
        next(whole_steps(loader, other))
