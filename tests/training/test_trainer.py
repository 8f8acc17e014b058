"""A run: the same whatever its cut, and the same after it was stopped anywhere."""

import copy
import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.batch.keyed_random import KeyedDropout
from truebatch.errors import ConfigError, LawError, NonFiniteError, RunError
from truebatch.training import context, validation
from truebatch.training.checkpoint.retention import best_step, list_checkpoints
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.optim.param_groups import Group
from truebatch.training.trainer import train

LENGTHS = [3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2, 14, 7, 19, 6, 11]
SAMPLES = text_samples(LENGTHS)
UNTIMED = ("seconds", "tokens_per_second")


class Dropping(TextModel):
    """With dropout of ours."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(KeyedDropout(0.1), self.head)


def model_of(kind=Dropping):
    torch.manual_seed(0)
    return kind()


def augment(sample, sample_id, epoch):
    """Exchange one token, by a coin that belongs to the sample and the epoch."""
    rng = np.random.default_rng((5, epoch, sample_id))
    ids = np.array(sample["input_ids"])
    ids[rng.integers(len(ids))] = rng.integers(1, 50)
    return {"input_ids": ids}


def data(**more):
    return TrainData(samples=SAMPLES, fields=TEXT_FIELDS, **more)


def settings(**more):
    return TrainConfig(**{"epochs": 2, "samples_per_step": 4, "cells": 64, "learning_rate": 1e-2, **more})


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain(model):
    """SGD: Adam would blow the rounding of a gradient that is zero by algebra (a key bias) up to a whole step."""
    return Group(optimiser=torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))


def untimed(records):
    return [{k: v for k, v in r.items() if k not in UNTIMED} for r in records]


@pytest.mark.parametrize(
    "cut",
    [
        {"cells": 31}, {"cells": 200}, {"layout": "packed"}, {"layout": "packed", "cells": 40},
        {"batch_size": 1}, {"true_batch": "off"}, {"batch_size": 2, "cells": None}, {"workers": 2},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_does_not_depend_on_its_cut(cut):
    whole, other = model_of(), model_of()
    expected = train(whole, NextToken(), data(transform=augment), settings(cells=10_000), groups=[plain(whole)])
    got = train(other, NextToken(), data(transform=augment), settings(**cut), groups=[plain(other)])
    assert [r["loss"] for r in got.records] == pytest.approx([r["loss"] for r in expected.records], rel=1e-6)
    assert float((weights(other) - weights(whole)).norm() / weights(whole).norm()) <= 1e-6
    assert [r["tokens"] for r in got.records] == [r["tokens"] for r in expected.records]


def test_training_lowers_the_loss():
    result = train(model_of(), NextToken(), data(), settings(epochs=15))
    assert result.records[-1]["loss"] < 0.7 * result.records[0]["loss"]
    assert result.why == "all steps are done"
    assert result.exit_code == 0


class StopAfter:
    """Asks the process to stop, as a scheduler does, when a sample is loaded for the nth time."""

    def __init__(self, number):
        self.number, self.seen = number, 0

    def __call__(self, sample, sample_id, epoch):
        self.seen += 1
        if self.seen == self.number:
            os.kill(os.getpid(), signal.SIGTERM)
        return augment(sample, sample_id, epoch)


def test_a_program_that_goes_on_after_training_can_end_with_it():
    stopped = train(model_of(), NextToken(), data(transform=StopAfter(4)), settings(max_steps=10))
    with pytest.raises(KeyboardInterrupt, match="asked to stop by SIGTERM"):
        stopped.raise_if_interrupted()
    train(model_of(), NextToken(), data(), settings(max_steps=2)).raise_if_interrupted()


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("at", [1, 4, 9, 16, 17, 30])
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(tmp_path, layout, at):
    config = settings(layout=layout, epochs=3, max_steps=10)
    whole = model_of()
    expected = train(whole, NextToken(), data(transform=augment), config, out=tmp_path / "whole")

    first = train(model_of(), NextToken(), data(transform=StopAfter(at)), config, out=tmp_path / "run")
    assert first.exit_code == 75
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 75
    model = model_of()
    rest = train(model, NextToken(), data(transform=augment), config, out=tmp_path / "run")

    assert torch.equal(weights(model), weights(whole))
    assert untimed([*first.records, *rest.records]) == untimed(expected.records)
    kept = [untimed(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("run", "whole")]
    assert kept[0] == kept[1]
    states = [load_newest(tmp_path / name / "checkpoints").checkpoint.parts for name in ("run", "whole")]
    for name, saved in states[0]["optimisers"]["main"]["state"].items():
        for key, value in saved.items():
            assert torch.equal(value, states[1]["optimisers"]["main"]["state"][name][key])
    assert states[0]["progress"] == states[1]["progress"]


def test_a_finished_run_is_not_trained_again(tmp_path):
    train(model_of(), NextToken(), data(), settings(), out=tmp_path / "run")
    model = model_of()
    again = train(model, NextToken(), data(), settings(), out=tmp_path / "run")
    assert not again.records
    assert not torch.equal(weights(model), weights(model_of()))


def test_other_settings_are_refused_with_the_field_named(tmp_path):
    train(model_of(), NextToken(), data(), settings(), out=tmp_path / "run")
    with pytest.raises(RunError, match="learning_rate"):
        train(model_of(), NextToken(), data(), settings(learning_rate=0.5), out=tmp_path / "run")


# --- validation ---------------------------------------------------------------------------------------------------------


def test_training_stops_when_validation_does_not_improve(tmp_path):
    config = settings(epochs=50, learning_rate=0.3, validate_every=2, patience=3, min_delta=1e-3)
    result = train(
        model_of(), NextToken(), data(validation=text_samples([9, 4, 12], seed=9)), config, out=tmp_path / "run"
    )
    assert "has not improved 3 times" in result.why
    assert result.step < 200
    lines = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "validation_loss" in r]
    best = min(lines, key=lambda r: r["validation_loss"])
    assert result.best_loss == best["validation_loss"]
    assert best_step(tmp_path / "run" / "checkpoints") == best["step"]
    assert best["step"] in [s.step for s in list_checkpoints(tmp_path / "run" / "checkpoints")]


# --- not finite -----------------------------------------------------------------------------------------------------------


class Poisoned(NextToken):
    """The loss of one sample is NaN."""

    def __init__(self, sample, value=math.nan):
        self.sample, self.value = sample, value

    def sums(self, model, batch):
        sums = super().sums(model, batch)
        return {"nll": sums["nll"] * self.value} if self.sample in batch.sample_ids else sums


def test_a_bad_step_is_stopped_before_the_update_and_its_samples_named(tmp_path):
    model = model_of()
    with pytest.raises(
        NonFiniteError, match=r"is not finite; the model was not updated[\s\S]*loss nll[\s\S]*samples \[.*\b6\b"
    ):
        train(model, Poisoned(6), data(), settings(), out=tmp_path / "run")
    assert torch.isfinite(weights(model)).all()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_step_changes_nothing_and_is_never_logged_as_a_number(tmp_path, value):
    model = model_of()
    result = train(model, Poisoned(6, value), data(), settings(epochs=1, nonfinite="skip"), out=tmp_path / "run")
    bad = [r for r in result.records if not math.isfinite(r["loss"])]
    assert len(bad) == 1
    assert not bad[0]["updated"]
    logged = next(r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["step"] == bad[0]["step"])
    assert logged["loss"] is None
    assert "loss" in logged["nonfinite"]
    assert torch.isfinite(weights(model)).all()
    assert all(s.is_good for s in list_checkpoints(tmp_path / "run" / "checkpoints"))


def test_skipping_leaves_parameters_and_optimiser_as_they_were():
    model = model_of()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    before = copy.deepcopy(weights(model))
    one_step = settings(samples_per_step=16, epochs=1, nonfinite="skip")
    train(model, Poisoned(6), data(), one_step, groups=[Group(optimiser=optimiser)])
    assert torch.equal(weights(model), before)
    assert not optimiser.state


def test_too_many_bad_steps_in_a_row_raise():
    class Always(NextToken):
        def sums(self, model, batch):
            return {"nll": super().sums(model, batch)["nll"] * math.nan}

    with pytest.raises(NonFiniteError, match="step 2 is not finite"):
        train(model_of(), Always(), data(), settings(nonfinite="skip_then_raise", nonfinite_limit=3))


def test_rolling_back_goes_on_from_the_last_good_checkpoint_without_the_bad_step(tmp_path):
    config = settings(epochs=1, save_every=1, nonfinite="roll_back")
    model = model_of()
    lines = []
    train(model, Poisoned(6), data(), config, out=tmp_path / "run", say=lines.append)
    assert any("rolled back" in line for line in lines)
    assert torch.isfinite(weights(model)).all()
    progress = load_newest(tmp_path / "run" / "checkpoints").checkpoint.parts["progress"]
    assert len(progress["skipped_steps"]) == 1
    assert progress["step"] == 4


# --- the law --------------------------------------------------------------------------------------------------------------


def test_foreign_dropout_is_refused_unless_allowed_by_name():
    model = model_of()
    model.head = nn.Sequential(nn.Dropout(0.1), model.head)
    with pytest.raises(LawError, match=r"dropout[\s\S]*head\.0 \(Dropout, p=0\.1\)[\s\S]*allow="):
        train(model, NextToken(), data(), settings())
    result = train(model, NextToken(), data(), settings(allow=("dropout",)))
    assert result.records[0]["equality"]["verdict"] == "in_distribution"
    assert {r["equality"] for r in result.records[1:]} == {"in_distribution"}


def test_batch_statistics_are_refused():
    model = model_of()
    model.norm = nn.BatchNorm1d(4)
    with pytest.raises(LawError, match="batch statistics"):
        train(model, NextToken(), data(), settings())


def test_compare_runs_both_ways_and_passes_a_right_model():
    lines = []
    train(model_of(), NextToken(), data(transform=augment), settings(true_batch="compare"), say=lines.append)
    assert sum("differ from one by one by" in line for line in lines) == 3


def test_compare_stops_a_model_that_mixes_samples():
    class Mixing(TextModel):
        def forward(self, batch):
            y = super().forward(batch)
            return y + y.mean(0, keepdim=True)

    with pytest.raises(
        LawError, match=r"do not give the gradient that one sample at a time gives[\s\S]*truebatch verify"
    ):
        train(model_of(Mixing), NextToken(), data(), settings(true_batch="compare"))


def test_declared_counts_must_be_the_real_ones():
    from truebatch.errors import BatchError
    from truebatch.planning.lengths.measured_values import Measured

    lengths = np.array(LENGTHS)
    right = Measured(lengths=lengths, counts={"nll": lengths - 1})
    train(model_of(), NextToken(), data(measured=right), settings(epochs=1))
    wrong = Measured(lengths=lengths, counts={"nll": lengths})
    with pytest.raises(BatchError, match="not what was declared"):
        train(model_of(), NextToken(), data(measured=wrong), settings(epochs=1))


# --- precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_and_resumes(tmp_path, precision):
    config = settings(precision=precision, epochs=6)
    result = train(model_of(), NextToken(), data(), config, out=tmp_path / "run")
    assert result.records[-1]["loss"] < result.records[0]["loss"]
    assert all(r["updated"] for r in result.records[-4:])
    parts = load_newest(tmp_path / "run" / "checkpoints").checkpoint.parts
    assert parts["model"]["head.1.weight"].dtype == torch.float32
    assert bool(parts["scaler"]) == (precision == "fp16")


# --- settings ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "samples", "limit"),
    [
        ({}, 32, None),
        ({"batch_size": 8}, 8, 8),
        ({"batch_size": 8, "gradient_accumulation_steps": 4}, 32, 8),
        ({"batch_size": 8, "gradient_accumulation_steps": 4, "devices": 2}, 64, 8),
        ({"batch_size": 8, "samples_per_step": 24}, 24, 8),
        ({"samples_per_step": 24}, 24, None),
        ({"batch_size": 8, "gradient_accumulation_steps": 4, "true_batch": "off"}, 32, 1),
    ],
)
def test_the_words_people_bring_mean_what_the_table_says(given, samples, limit):
    plan = TrainConfig(**given).plan_config()
    assert (plan.samples_per_step, plan.samples) == (samples, limit)


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": -1.0}, {"precision": "int8"}, {"true_batch": "maybe"},
     {"min_learning_rate": 1.0}, {"max_grad_norm": math.nan}, {"nonfinite": "ignore"}, {"samples_per_step": 2.5}],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainConfig(**wrong)


def test_another_number_of_processes_than_asked_for_is_an_error():
    with pytest.raises(ConfigError, match=r"devices=2, 1 process"):
        train(model_of(), NextToken(), data(), settings(devices=2))


def test_training_works_outside_the_main_thread():
    done = []
    thread = threading.Thread(target=lambda: done.append(train(model_of(), NextToken(), data(), settings(epochs=1))))
    thread.start()
    thread.join()
    assert done[0].step == 4


# --- Hugging Face models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gradient_checkpointing_changes_memory_and_nothing_else(layout):
    from truebatch.hf.heads.heads import head_of
    from truebatch.hf.heads.objective import HeadObjective
    from truebatch.testing.tiny_hf.model import tiny_model
    from truebatch.testing.tiny_hf.random_samples import make_samples

    weights_of = {}
    for is_checkpointed in (False, True):
        model = tiny_model("llama")
        samples = make_samples(model, [9, 4, 17, 6, 12, 8])
        objective = HeadObjective(head=head_of(model))
        config = settings(epochs=1, samples_per_step=3, layout=layout, gradient_checkpointing=is_checkpointed)
        train(model, objective, TrainData(samples=samples, fields=objective.head.fields), config, groups=[plain(model)])
        weights_of[is_checkpointed] = weights(model)
    assert float((weights_of[True] - weights_of[False]).norm() / weights_of[False].norm()) <= 1e-6


def test_a_model_that_cannot_checkpoint_activations_says_so():
    with pytest.raises(ConfigError, match="gradient_checkpointing_enable"):
        train(model_of(), NextToken(), data(), settings(gradient_checkpointing=True))


@pytest.mark.parametrize(
    ("variable", "words"), [("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_FSDP", "FSDP")]
)
def test_engines_that_would_own_the_step_are_refused(variable, words, monkeypatch):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ConfigError, match=words):
        train(model_of(), NextToken(), data(), settings())


def test_a_run_that_no_longer_moves_is_reported_with_its_stacks():
    import subprocess
    import sys

    code = (
        "import time\n"
        "from tests.training.test_trainer import *\n"
        "def hang(sample, sample_id, epoch):\n"
        "    time.sleep(60)\n"
        "train(model_of(), NextToken(), data(transform=hang), settings(stuck_seconds=1.0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert "rank 0" in done.stderr
    assert "in hang" in done.stderr


class CountedReads:
    """A dataset that knows how often each sample was read."""

    def __init__(self, samples):
        self.samples, self.reads = samples, [0] * len(samples)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, sample_id):
        self.reads[sample_id] += 1
        return self.samples[sample_id]


def test_samples_are_read_once_to_be_measured_and_compared_and_validation_samples_once_in_all(tmp_path):
    """Beside training: the first two are read once more, to see whether a sample is the same each time."""
    samples, held = CountedReads(text_samples([3, 9, 5, 7])), CountedReads(text_samples([4, 6, 8]))
    data = TrainData(samples=samples, fields=TEXT_FIELDS, validation=held)
    config = TrainConfig(epochs=3, samples_per_step=2, cells=32)
    train(TextModel(), NextToken(), data, config, out=tmp_path / "run")
    assert samples.reads == [1 + 1 + 3] * 2 + [1 + 3] * 2
    assert held.reads == [1 + 3] * 3


def test_every_epoch_is_planned_once_and_validation_once(monkeypatch):
    planned = []
    for module in (context, validation):
        real = module.build_plan
        monkeypatch.setattr(
            module, "build_plan", lambda *a, real=real, **k: planned.append(k.get("epoch")) or real(*a, **k)
        )
    data = TrainData(samples=text_samples([3, 9, 5, 7]), fields=TEXT_FIELDS, validation=text_samples([4, 6]))
    train(TextModel(), NextToken(), data, TrainConfig(epochs=3, samples_per_step=2, cells=32))
    assert planned == [0, None, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_is_loaded_with_the_workers_of_training_and_gives_the_same_loss(monkeypatch, workers):
    found, real = [], validation.load_steps
    monkeypatch.setattr(validation, "load_steps", lambda *a, **k: found.append(k["config"].workers) or real(*a, **k))
    data = TrainData(samples=text_samples([3, 9, 5, 7]), fields=TEXT_FIELDS, validation=text_samples([4, 6, 8]))
    torch.manual_seed(0)
    config = TrainConfig(epochs=1, samples_per_step=4, cells=32, workers=workers)
    best = train(TextModel(), NextToken(), data, config).best_loss
    assert found == [workers]
    torch.manual_seed(0)
    assert best == train(TextModel(), NextToken(), data, replace(config, workers=0)).best_loss
