"""Loops that are not ours check their first step too, once a model, and stop before the first update where it is broken."""

import copy
import logging
from dataclasses import replace

import pytest
import torch

from tests.adapters.trainers import PlannedTrainer, arguments, build
from tests.tiny import TEXT_FIELDS, NextToken
from tests.training.checks import faults
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.adapters.step_loss import step_loss
from truebatch.data.loader import load_steps
from truebatch.errors import LawError
from truebatch.hf.mixers.trial_rows import LENGTHS
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan

LOG = "truebatch.adapters.step_loss"


def steps(layout="packed"):
    plan = build_plan(faults.LENGTHS, PlanConfig(samples_per_step=6, layout=layout, cells=128))
    return list(load_steps(plan, faults.SAMPLES, list(TEXT_FIELDS)))


@pytest.mark.parametrize(
    ("model", "loss"), [("LeakyMean", "NextToken"), ("ShiftedAcross", "NextToken"), ("TextModel", "MeanInSums")]
)
def test_a_loop_with_step_loss_stops_at_its_first_step(model, loss):
    made = faults.model_named(model)
    with pytest.raises(LawError, match="gives other results in a batch than alone"):
        step_loss(made, getattr(faults, loss)(), steps()[0])
    assert all(p.grad is None for p in made.parameters())


def test_it_is_said_once_and_changes_no_gradient(caplog):
    caplog.set_level(logging.WARNING, LOG)
    checked, plain = faults.model_named("Keyed"), faults.model_named("Keyed")
    for number, step in enumerate(steps()):
        step_loss(checked, NextToken(), step).backward()
        step_loss(plain, NextToken(), step, check_samples=0).backward()
        assert len([line for line in caplog.messages if line.startswith("equality: checked on 6 samples")]) == 1, number
    assert "equality: not checked: check_samples is 0" in caplog.messages
    for one, other in zip(checked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_dropout_that_is_not_keyed_is_said_to_hold_in_distribution(caplog):
    caplog.set_level(logging.WARNING, LOG)
    step_loss(faults.model_named("Noisy"), NextToken(), steps()[0]).backward()
    assert any("in distribution; compared with dropout switched off" in line for line in caplog.messages)


def test_a_step_that_does_not_say_how_it_holds_samples_is_not_said_to_be_checked(caplog):
    caplog.set_level(logging.WARNING, LOG)
    step_loss(faults.model_named("TextModel"), NextToken(), replace(steps()[0], fields=())).backward()
    assert any("not checked: the step does not say how it holds a sample" in line for line in caplog.messages)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_trainer_stops_before_its_first_update(tmp_path, layout):
    model, samples = build("causal_lm")
    longest = sum(LENGTHS) if layout == "packed" else 0  # what the trial of packed rows cannot see

    def leak(_module, _given, out):
        return out + 0.1 * out.mean(1, keepdim=True) if out.shape[1] > longest else out

    model.model.norm.register_forward_hook(leak)
    before = copy.deepcopy(model.state_dict())
    trainer = PlannedTrainer(
        model=model,
        args=arguments(tmp_path, per_device_train_batch_size=8, num_train_epochs=1),
        train_dataset=samples,
        truebatch=AdapterConfig(layout=layout),
    )
    with pytest.raises(LawError, match="gives other results in a batch than alone"):
        trainer.train()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
