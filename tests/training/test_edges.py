"""Where a run could go on wrongly, or not at all: loss scaling, more steps, damaged files, changed surroundings."""

import math
import os
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests import tasks
from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RunError
from truebatch.training.checkpoint.retention import list_checkpoints
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.optim.param_groups import Group
from truebatch.training.run_dir.watchdog import Watchdog
from truebatch.training.train_system import Start, settings_type, train_system
from truebatch.training.trainer import train

SAMPLES = text_samples([3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2, 14, 7, 19, 6, 11])
BAD = 6


def model_of():
    torch.manual_seed(0)
    return TextModel()


def data(samples=SAMPLES, **more):
    return TrainData(samples=samples, fields=TEXT_FIELDS, **more)


def settings(**more):
    return TrainConfig(**{"epochs": 2, "samples_per_step": 4, "cells": 64, "learning_rate": 1e-2, **more})


class BadSample(NextToken):
    """The loss of one sample is NaN."""

    def sums(self, model, batch):
        total = super().sums(model, batch)["nll"]
        return {"nll": total * (math.nan if BAD in batch.sample_ids else 1.0)}


class SickGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


class AlwaysSick(NextToken):
    """A gradient that no loss scale makes finite."""

    def sums(self, model, batch):
        return {"nll": SickGradient.apply(super().sums(model, batch)["nll"])}


class SickOnce(NextToken):
    """The first loss it gives is NaN."""

    is_sick = True

    def sums(self, model, batch):
        total = super().sums(model, batch)["nll"]
        factor, self.is_sick = (math.nan if self.is_sick else 1.0), False
        return {"nll": total * factor}


@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_with_loss_scaling_a_run_goes_on_after_a_bad_step(tmp_path, policy):
    config = settings(precision="fp16", nonfinite=policy, save_every=1)
    result = train(model_of(), BadSample(), data(), config, out=tmp_path / "run")
    assert result.step == 8
    assert result.why == "all steps are done"
    assert any(record["updated"] for record in result.records)


def test_a_gradient_that_stays_nan_is_not_taken_for_a_loss_scale_that_is_too_high():
    with pytest.raises(NonFiniteError, match="gradient of main"):
        train(model_of(), AlwaysSick(), data(), settings(precision="fp16", epochs=10))


class NowAndThen(NextToken):
    """A second term that only the micro-batches with one sample have."""

    def counts(self, batch):
        return {**super().counts(batch), "size": int(BAD in batch.sample_ids)}

    def sums(self, model, batch):
        size = sum(p.square().sum() for p in model.head.parameters())
        return {**super().sums(model, batch), **({"size": size} if BAD in batch.sample_ids else {})}


def test_loss_scaling_passes_over_an_optimiser_without_a_gradient_in_this_step():
    model = model_of()
    head = list(model.head.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    groups = [
        Group(name="rest", terms=("nll",), optimiser=torch.optim.SGD(rest, 0.1)),
        Group(name="head", terms=("size",), optimiser=torch.optim.SGD(head, 0.1)),
    ]
    before = model.head.weight.detach().clone()
    assert train(model, NowAndThen(), data(), settings(precision="fp16"), groups=groups).step == 8
    assert not torch.equal(before, model.head.weight)


def test_a_finished_run_that_gets_more_epochs_and_rolls_back_still_does_them(tmp_path):
    train(model_of(), NextToken(), data(), settings(epochs=1, nonfinite="roll_back"), out=tmp_path / "run")
    more = settings(epochs=3, nonfinite="roll_back", check_samples=0)  # the check would take the first loss
    result = train(model_of(), SickOnce(), data(), more, out=tmp_path / "run")
    assert result.step == 12


def test_a_damaged_checkpoint_is_written_anew_when_the_run_comes_to_its_step_again(tmp_path):
    folder = tmp_path / "run/checkpoints"
    train(model_of(), NextToken(), data(), settings(save_every=2, max_steps=6), out=tmp_path / "run")
    file = folder / "step-6/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    result = train(model_of(), NextToken(), data(), settings(save_every=2, max_steps=8), out=tmp_path / "run")
    assert result.step == 8
    assert file.read_bytes() != bytes(content)


class Stale(NextToken):
    """A validation loss that never gets better; the process is asked to stop in one of the validations."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at, self.seen = stop_at, 0

    def sums(self, model, batch):
        sums = super().sums(model, batch)
        if model.training:
            return sums
        self.seen += 1
        if self.seen == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"nll": sums["nll"] * 0 + self.counts(batch)["nll"]}


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_a_request_to_stop_does_not_undo_early_stopping(tmp_path, stop_at):
    config = settings(validate_every=1, patience=2, epochs=4)
    watched = data(validation=SAMPLES[:2])
    whole = train(model_of(), Stale(stop_at=0), watched, config)
    train(model_of(), Stale(stop_at), watched, config, out=tmp_path / "run")
    again = train(model_of(), Stale(stop_at=0), watched, config, out=tmp_path / "run")
    assert (again.step, again.why) == (whole.step, whole.why) == (3, "validation has not improved 2 times")


class ToldAtValidation(NextToken):
    """Keeps how often the watchdog was told that the run moves, before every batch of validation."""

    def __init__(self, beats):
        self.beats, self.told = beats, []

    def sums(self, model, batch):
        if not model.training:
            self.told.append(len(self.beats))
        return super().sums(model, batch)


def test_a_validation_longer_than_the_patience_of_the_watchdog_is_not_a_stuck_run(monkeypatch):
    """Without a clock: every batch of validation is a sign of life, so no number of them adds up to a silence."""
    beats, beat = [], Watchdog.beat
    monkeypatch.setattr(Watchdog, "beat", lambda dog, doing="": (beats.append(doing), beat(dog, doing)))
    objective = ToldAtValidation(beats)
    train(model_of(), objective, data(validation=SAMPLES), settings(epochs=1, batch_size=1))
    assert len(objective.told) == len(SAMPLES)
    assert all(first < second for first, second in pairwise(objective.told))


class Unlabelled(NextToken):
    def counts(self, batch):
        return {"nll": 0} if set(batch.sample_ids) <= {0, 1} else super().counts(batch)


def test_a_validation_loss_over_nothing_is_refused_and_never_the_best():
    with pytest.raises(DataError, match="nothing to measure a loss on"):
        train(model_of(), Unlabelled(), data(validation=SAMPLES[:2]), settings())


def test_an_optimiser_that_needs_the_gradient_several_times_is_refused():
    model = model_of()
    with pytest.raises(ConfigError, match="several times"):
        train(model, NextToken(), data(), settings(), groups=[Group(optimiser=torch.optim.LBFGS(model.parameters()))])


@pytest.mark.parametrize(("schedule", "is_told"), [("cosine", True), ("constant", False)])
def test_a_run_says_when_more_steps_change_its_learning_rates(tmp_path, schedule, is_told):
    said = []
    for epochs in (1, 2):
        said.clear()
        config = settings(epochs=epochs, schedule=schedule)
        train(model_of(), NextToken(), data(), config, out=tmp_path / "run", say=said.append)
    assert any("had 4 steps and now has 8" in line for line in said) == is_told


def test_a_run_does_not_go_on_with_weights_of_another_dtype(tmp_path):
    train(model_of(), NextToken(), data(), settings(max_steps=3), out=tmp_path / "run")
    with pytest.raises(CheckpointError, match="another dtype"):
        train(model_of().bfloat16(), NextToken(), data(), settings(), out=tmp_path / "run")


@pytest.mark.parametrize("other", [SAMPLES[:8], SAMPLES[::-1]], ids=["fewer", "other lengths"])
def test_a_run_does_not_go_on_with_other_samples(tmp_path, other):
    train(model_of(), NextToken(), data(), settings(max_steps=3), out=tmp_path / "run")
    with pytest.raises(RunError, match="not what this run began with"):
        train(model_of(), NextToken(), data(other), settings(), out=tmp_path / "run")


def test_other_devices_do_not_change_the_samples_of_a_step_unnoticed(tmp_path, monkeypatch):
    config = TrainConfig(batch_size=4, max_steps=2)
    train(model_of(), NextToken(), data(), config, out=tmp_path / "run")
    monkeypatch.setattr("truebatch.training.distributed.device.num_ranks", lambda: 2)
    monkeypatch.setattr("truebatch.training.distributed.device.move_model", lambda *_: None)
    monkeypatch.setattr("truebatch.training.trainer.move_model", lambda *_: None)
    with pytest.raises(RunError, match="samples_per_step is changed"):
        train(model_of(), NextToken(), data(), replace(config, devices=2), out=tmp_path / "run")
    same = replace(config, samples_per_step=4, devices=2)
    assert train(model_of(), NextToken(), data(), same, out=tmp_path / "run").why == "all steps were done before"


class LastIsNan(torch.optim.SGD):
    """Writes NaN into a parameter at its eighth update."""

    number = 0

    def step(self, closure=None):
        super().step(closure)
        self.number += 1
        if self.number == 8:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0] = math.nan


def test_a_checkpoint_that_is_not_good_is_said_to_be_so(tmp_path):
    model, said = model_of(), []
    groups = [Group(optimiser=LastIsNan(model.parameters(), 0.1))]
    with pytest.raises(NonFiniteError, match="the model is not finite after step 8"):
        train(model, NextToken(), data(), settings(), groups=groups, out=tmp_path / "run", say=said.append)
    assert [saved.is_good for saved in list_checkpoints(tmp_path / "run/checkpoints")] == [True, False]
    assert any("step 8: NaN or infinity in model" in line for line in said)


def test_a_model_whose_export_was_killed_is_exported_by_the_next_start(tmp_path):
    def save(model: nn.Module, folder):
        if is_killed:
            raise KeyboardInterrupt
        (folder / "head").write_text(repr(model.head.weight.tolist()))

    system = replace(tasks.system, prepare=lambda config: replace(tasks.prepare(config), save=save))
    kind = settings_type(system)
    model = tmp_path / "run/model/head"
    texts = []
    for epochs, is_killed in ((1, False), (2, True), (2, False), (2, False)):
        config = kind(train=TrainConfig(samples_per_step=4, epochs=epochs))
        try:
            train_system(system, config, Start(out=tmp_path / "run"))
        except KeyboardInterrupt:
            assert is_killed
        texts.append(model.read_text())
    assert texts[0] == texts[1] != texts[2] == texts[3]
