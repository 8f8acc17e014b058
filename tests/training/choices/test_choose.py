"""A run chooses what nobody gave for the device it is on, says why, and repeats it when it goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests import tasks
from truebatch.errors import ConfigError
from truebatch.planning.lengths.measured_values import Measured as MeasuredLengths
from truebatch.testing.length_distributions import example_lengths
from truebatch.training.choices import choose as module
from truebatch.training.choices import measured_speed
from truebatch.training.choices.choose import (
    Chooser,
    choose_cells,
    choose_compile,
    choose_precision,
    choose_settings,
    choose_workers,
    tokens_to_come,
)
from truebatch.training.choices.device_facts import DeviceFacts, device_facts
from truebatch.training.choices.measured_speed import ALONE, MeasuredSpeed, budgets_to_try, largest_useful
from truebatch.training.choices.run_choices import CHOICES
from truebatch.training.config import CHOOSABLE, TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.system import Task, TaskCommands, settings_type
from truebatch.training.train_system import Start, train_system
from truebatch.training.trainer import train

CPU = DeviceFacts(kind="cpu", name="cpu", has_bf16=False, can_compile=False, cores=2)
GPU = DeviceFacts(kind="cuda", name="a GPU", has_bf16=True, can_compile=True, cores=8)
OLD_GPU = replace(GPU, has_bf16=False, can_compile=False)
KIND = settings_type(tasks.system)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "free_bytes_of", lambda _device: 1 << 20)  # else probes fill this machine


def small():
    task = tasks.system.prepare(tasks.Settings())
    return task, task.build_model(), task.measured_data()


def never(*_args, **_more):
    raise AssertionError("nothing is measured here")


def test_precision_follows_the_device():
    assert choose_precision(GPU).value == "bf16"
    assert choose_precision(OLD_GPU).value == "fp32"
    assert choose_precision(CPU).value == "fp32"
    assert device_facts(torch.device("cpu")).has_bf16 is False


def test_a_short_run_on_a_cpu_measures_nothing(monkeypatch):
    monkeypatch.setattr(module, "open_engine", never)
    config, choices = choose_settings(*small(), TrainConfig.auto(samples_per_step=8), facts=CPU)
    assert config == TrainConfig(samples_per_step=8)
    assert [one.setting for one in choices] == ["precision", "cells", "compile", "workers"]
    assert all(one.line.startswith(f"{one.setting}: ") for one in choices)


def test_a_long_run_on_a_cpu_takes_the_budget_that_is_fastest_there(monkeypatch):
    monkeypatch.setattr(module, "MEASURE_FROM", 0.0)
    told = []
    config, choices = choose_settings(*small(), TrainConfig.auto(samples_per_step=8), facts=CPU, say=told.append)
    assert config.choose == ()
    assert config.cells is not None or config.batch_size == 1
    assert config.samples_per_step == 8
    assert any(line.startswith("timing") for line in told)
    assert "tokens/s" in next(one.line for one in choices if one.setting == "cells")


def test_on_a_gpu_memory_is_measured_and_no_budget_is_above_what_is_safe():
    told = []
    config, choices = choose_settings(*small(), TrainConfig.auto(samples_per_step=8), facts=GPU, say=told.append)
    lines = {one.setting: one.line for one in choices}
    assert config.precision == "bf16"
    assert config.cells is not None
    assert "fit in memory" in lines["cells"]
    assert any(line.startswith("measuring memory") for line in told)


def test_what_was_measured_is_found_by_the_next_run(monkeypatch):
    monkeypatch.setattr(module, "MEASURE_FROM", 0.0)
    task, model, data = small()
    first, _ = choose_settings(task, model, data, TrainConfig.auto(samples_per_step=8), facts=CPU)
    monkeypatch.setattr(measured_speed, "time_budgets", never)
    again, choices = choose_settings(task, model, data, TrainConfig.auto(samples_per_step=8), facts=CPU)
    assert again == first
    assert any("as an earlier run has measured" in one.line for one in choices)
    with pytest.raises(AssertionError, match="nothing is measured"):
        choose_settings(task, model, data, TrainConfig.auto(samples_per_step=8), facts=replace(CPU, name="another"))


def test_a_damaged_file_of_measurements_is_measured_again(tmp_path):
    found = MeasuredSpeed(fit=None, speeds={1024: 5.0}, load_seconds=0.1)
    measured_speed.keep_measured(found, "some-key")
    assert measured_speed.kept_measured("some-key") == found
    (file,) = (tmp_path / "cache" / "measured").iterdir()
    for damage in (
        "",
        "[]",
        "{",
        '{"speeds": {"x": 1}, "fit": null, "load_seconds": 0}',
        '{"speeds": {}, "fit": null}',
    ):
        file.write_text(damage)
        assert measured_speed.kept_measured("some-key") is None


def test_measuring_changes_no_weight_and_no_generator(monkeypatch):
    monkeypatch.setattr(module, "MEASURE_FROM", 0.0)
    task, model, data = small()
    before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    choose_settings(task, model, data, TrainConfig.auto(samples_per_step=8), facts=CPU)
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())


def layered(lengths, *, can_compile=True):
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    data = TrainData(samples=[], fields=[], measured=MeasuredLengths(lengths=lengths))
    task = Task(data=data, build_model=never, objective=None, commands=TaskCommands(can_compile=can_compile))
    return Chooser(task=task, model=model, data=data, facts=GPU, say=lambda _line: None)


def speeds(rate, load_seconds=0.0):
    return MeasuredSpeed(fit=None, speeds={16384: rate}, load_seconds=load_seconds)


PACKED = TrainConfig(layout="packed", cells=16384, samples_per_step=256, epochs=20)


def test_layers_are_compiled_where_the_steps_to_come_repay_it():
    chooser = layered(example_lengths("chat", 3000))
    seconds = tokens_to_come(chooser.data, PACKED) / 50_000
    assert seconds > 300
    on = choose_compile(chooser, PACKED, speeds(5_000))
    assert on.value is True
    assert "full" in on.why
    assert choose_compile(chooser, PACKED, speeds(500_000)).value is False
    assert choose_compile(chooser, replace(PACKED, max_steps=2), speeds(5_000)).value is False


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"layout": "padded"}, {}),
        ({"cells": None}, {}),
        ({"batch_size": 4}, {}),
        ({"gradient_checkpointing": True}, {}),
        ({}, {"can_compile": False}),
    ],
)
def test_layers_are_not_compiled_where_that_is_not_known_to_work(changes, more):
    chooser = layered(example_lengths("chat", 3000), **more)
    assert choose_compile(chooser, replace(PACKED, **changes), speeds(5_000)).value is False


def test_layers_are_not_compiled_for_rows_that_would_be_half_empty_nor_without_a_compiler():
    chooser = layered(example_lengths("patient", 3000))
    choice = choose_compile(chooser, replace(PACKED, samples_per_step=2, epochs=500), speeds(1_000))
    assert choice.value is False
    assert "full" in choice.why
    assert choose_compile(replace(chooser, facts=OLD_GPU), PACKED, speeds(5_000)).value is False


def test_workers_keep_ahead_of_a_gpu_and_leave_a_cpu_its_cores():
    chooser = layered(np.full(100, 300))
    assert choose_workers(chooser, PACKED, speeds(50_000, load_seconds=1e-5)).value == 0
    assert choose_workers(chooser, PACKED, speeds(50_000, load_seconds=0.0095)).value == 3
    assert choose_workers(chooser, PACKED, speeds(50_000, load_seconds=1.0)).value == 4
    assert choose_workers(replace(chooser, facts=CPU), PACKED, speeds(50_000, load_seconds=1.0)).value == 0


def test_one_sample_at_a_time_is_taken_where_it_is_fastest_and_the_step_stays_as_large():
    measured = MeasuredSpeed(fit=None, speeds={ALONE: 100.0, 1024: 90.0}, load_seconds=0.0)
    choice = choose_cells(replace(layered(np.full(10, 5)), facts=CPU), TrainConfig(batch_size=None), measured, "now")
    assert choice.also == {"batch_size": 1, "samples_per_step": 32}


def test_the_smallest_budget_that_is_nearly_fastest_is_taken():
    measured = MeasuredSpeed(fit=None, speeds={1024: 50.0, 4096: 99.0, 16384: 100.0, 65536: 95.0}, load_seconds=0.0)
    assert measured.fastest() == 4096
    assert measured.fastest(2048) == 1024


@pytest.mark.parametrize(
    ("changes", "cells"), [({}, 32768), ({"compile": False}, 4096), ({"samples_per_step": 2}, 4096)]
)
def test_rows_to_be_compiled_are_wide_where_they_stay_full_and_fast(changes, cells):
    measured = MeasuredSpeed(
        fit=None, speeds={4096: 3_990.0, 16384: 4_000.0, 32768: 3_950.0, 65536: 3_900.0}, load_seconds=0.0
    )
    opened = {"choose": ("cells", *(() if "compile" in changes else ("compile",)))}
    config = replace(PACKED, cells=None, **{**opened, **changes})
    choice = choose_cells(layered(np.minimum(example_lengths("chat", 3000), 4096)), config, measured, "now")
    assert choice.value == cells


def test_budgets_hold_the_longest_sample_and_go_no_further_than_a_step():
    lengths = np.array([10, 3000, 500])
    assert budgets_to_try(lengths, most=10000, is_gpu=True) == [3000, 4096, 8192, 10000]
    assert budgets_to_try(lengths, most=9000, is_gpu=True) == [3000, 4096, 9000]
    assert budgets_to_try(lengths, most=100, is_gpu=False) == [ALONE, 3000]
    assert largest_useful(lengths, TrainConfig(samples_per_step=8)) == 8 * 1170
    assert largest_useful(lengths, TrainConfig(samples_per_step=2)) == 3000


def test_what_a_run_cannot_choose_is_refused():
    with pytest.raises(ConfigError, match="cannot choose"):
        TrainConfig(choose=("seed",))
    assert TrainConfig.auto(layout="packed").choose == tuple(name for name in CHOOSABLE if name != "layout")


def config_of(**train):
    return KIND(train=TrainConfig.auto(samples_per_step=8, **train))


def test_a_run_says_and_keeps_its_choices_and_a_resumed_one_chooses_nothing_anew(tmp_path, monkeypatch):
    said = []
    train_system(tasks.system, config_of(max_steps=1), Start(out=tmp_path / "run", say=said.append))
    kept = json.loads((tmp_path / "run" / CHOICES).read_text())
    assert {one["setting"] for one in kept} == {"precision", "cells", "compile", "workers"}
    assert "precision: fp32, for the model runs on a CPU (--set train.precision=... overrides it)" in said
    monkeypatch.setattr(module, "choose_precision", never)
    monkeypatch.setattr("truebatch.training.choices.run_choices.choose_settings", never)
    monkeypatch.setattr("truebatch.training.choices.run_choices.choose_precision", never)
    again = []
    train_system(tasks.system, config_of(max_steps=3), Start(out=tmp_path / "run", say=again.append))
    assert "precision: fp32, as the run began" in again
    assert json.loads((tmp_path / "run" / CHOICES).read_text()) == kept


def test_one_at_a_time_is_kept_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEASURE_FROM", 0.0)
    alone = MeasuredSpeed(fit=None, speeds={ALONE: 9.0}, load_seconds=0.0)
    monkeypatch.setattr(module, "time_measured", lambda *_args, **_more: alone)
    for steps in (1, 3):
        result = train_system(tasks.system, config_of(max_steps=steps), Start(out=tmp_path / "run"))
        assert result.step == steps
        assert "batch_size: 1" in (tmp_path / "run/config.yaml").read_text()


def test_without_settings_a_run_of_the_library_chooses_too(tmp_path):
    task, model, data = small()
    said = []
    result = train(model, task.objective, data, out=tmp_path / "run", say=said.append)
    assert result.step == 1
    assert (tmp_path / "run" / CHOICES).exists()
    assert any(line.startswith("precision: fp32, for the model runs on a CPU") for line in said)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task, model, data = small()
    train(model, task.objective, data, TrainConfig())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_compiling_may_be_asked_for_while_the_rest_is_left_open():
    asked = TrainConfig.auto(samples_per_step=8, compile=True)
    assert "compile" not in asked.choose
    task, model, data = small()
    task = replace(task, commands=replace(task.commands, choose_layout=lambda _model: ("packed", "layout: packed")))
    config, _ = choose_settings(task, model, data, asked, facts=GPU)
    assert (config.compile, config.layout) == (True, "packed")
    assert config.cells is not None


def test_compiling_is_refused_where_the_layout_that_is_chosen_has_no_rows_of_one_shape():
    task, model, data = small()
    task = replace(task, commands=replace(task.commands, choose_layout=lambda _model: ("padded", "layout: padded")))
    with pytest.raises(ConfigError, match="rows of one shape"):
        choose_settings(task, model, data, TrainConfig.auto(samples_per_step=8, compile=True), facts=GPU)


@pytest.mark.parametrize(("packed", "padded", "taken"), [(100.0, 120.0, "padded"), (100.0, 102.0, "packed")])
def test_the_layout_that_is_measured_to_be_faster_is_taken_of_two_that_are_proven(monkeypatch, packed, padded, taken):
    known = {"packed": packed, "padded": padded}

    def measured(_chooser, config):
        return MeasuredSpeed(fit=None, speeds={1024: known[config.layout]}, load_seconds=0.0), "as measured now"

    monkeypatch.setattr(module, "measure", measured)
    task, model, data = small()
    commands = TaskCommands(
        choose_layout=lambda _model: ("packed", "layout: packed"), other_layout=lambda _model: "padded"
    )
    config, choices = choose_settings(
        replace(task, commands=commands), model, data, TrainConfig.auto(samples_per_step=8), facts=CPU
    )
    (line,) = [one.line for one in choices if one.setting == "layout"]
    assert config.layout == taken
    assert ("120 against 100 tokens/s" in line) == (taken == "padded")
    assert f"{known[taken]:,.0f} tokens/s" in next(one.line for one in choices if one.setting == "cells")


def test_no_other_layout_is_timed_where_compiled_rows_are_asked_for():
    task, model, data = small()
    commands = TaskCommands(choose_layout=lambda _model: ("packed", "layout: packed"), other_layout=never)
    asked = TrainConfig.auto(samples_per_step=8, compile=True)
    assert choose_settings(replace(task, commands=commands), model, data, asked, facts=GPU)[0].layout == "packed"
