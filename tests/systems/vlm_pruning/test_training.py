"""Runs: resumed, cut, one by one, and through the command line's own settings; schedules of one clock."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.systems.vlm_pruning.worlds import METHOD, batch_of, build, encode, samples
from truebatch.batch.keyed_random import noise_for
from truebatch.cli.app import run as cli
from truebatch.config.load import load_config
from truebatch.errors import ConfigError, RunError
from truebatch.training.load_trained import open_trained
from truebatch.training.train_system import Start, settings_type, train_system
from truebatch_systems.vlm_pruning.config import MethodSettings
from truebatch_systems.vlm_pruning.eval.evaluate import at_budget
from truebatch_systems.vlm_pruning.system import VLM_PRUNING, build_model, make_groups, num_steps
from truebatch_systems.vlm_pruning.train.callbacks import Clock, FreshJudge, begin_anew
from truebatch_systems.vlm_pruning.train.objective import PruningObjective, sample_terms
from truebatch_systems.vlm_pruning.train.schedules import moment_at, progress_of

SMALL = (
    "backbone_settings.name=tiny-llava",
    "dataset_settings.name=random",
    "dataset_settings.train=12",
    "dataset_settings.validation=4",
    "dataset_settings.test=4",
    "method_settings.pruning_layers=[1,3]",
    "method_settings.pruner_d_internal=16",
    "method_settings.pruner_num_heads=2",
    "method_settings.disc_d_d=16",
    "method_settings.disc_target_layers=[-1,-2,-3]",
    "method_settings.use_token_num_target=false",
    "method_settings.target_sparsity=0.5",
    "method_settings.disc_reinit_prob=0.3",
    "train.samples_per_step=4",
    "train.learning_rate=1e-3",
    "train.min_learning_rate=1e-5",
)


def settings(*more: str):
    return load_config(settings_type(VLM_PRUNING), None, overrides=[*SMALL, *more])


def run(folder, *more: str):
    """A finished run: the model's learned weights and the losses of its steps."""
    models = []
    system = replace(VLM_PRUNING, prepare=partial(_kept, models))
    result = train_system(system, settings(*more), Start(out=folder, target="vlm_pruning"))
    learned = {n: p.detach().clone() for n, p in models[-1].named_parameters() if p.requires_grad}
    return learned, [record["loss"] for record in result.records]


def _kept(models, config):
    def build():
        models.append(build_model(config))
        return models[-1]

    return replace(VLM_PRUNING.prepare(config), build_model=build)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight") / "run", "train.epochs=2")


def difference(one, other) -> float:
    """Of all weights as one vector, relative."""
    change, whole = (
        torch.cat([t.flatten() for t in part]).norm() for part in ([one[n] - other[n] for n in one], other.values())
    )
    return float(change / whole)


def test_a_run_in_two_parts_is_the_run_in_one(straight, tmp_path):
    weights, losses = straight
    again = tmp_path / "again"
    run(again, "train.epochs=2", "train.save_every=3")
    for folder in sorted((again / "checkpoints").iterdir()):
        if folder.name != "step-3" and folder.is_dir():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    resumed, rest = run(again, "train.epochs=2", "train.save_every=3")
    assert len(losses) == 6
    assert rest == pytest.approx(losses[3:], rel=1e-6)
    assert difference(resumed, weights) <= 1e-6


@pytest.mark.parametrize(
    "more",
    [
        ("train.batch_size=3",),
        ("backbone_settings.mllm_settings.enable_true_batch=false",),
        ("train.layout=packed", "train.cells=150"),
        ("train.gradient_checkpointing=true",),
    ],
)
def test_how_a_step_is_cut_changes_nothing(straight, tmp_path, more):
    weights, losses = straight
    cut, cut_losses = run(tmp_path / "run", "train.epochs=2", *more)
    assert cut_losses == pytest.approx(losses, rel=1e-4)
    assert difference(cut, weights) <= 1e-4


@pytest.mark.parametrize(
    "more",
    [
        ("method_settings.teacher=distillation", "method_settings.choice=straight_through"),
        ("method_settings.teacher=none", "method_settings.choice=top_k"),
        ("method_settings.budget_of=average", "method_settings.choice=straight_through"),
        ("method_settings.enable_token_merger=true", "method_settings.token_count_loss_weight=0.1"),
        ("train.precision=bf16",),
        ("backbone_settings.name=tiny-llava-next",),
        ("backbone_settings.name=tiny-qwen2.5-vl",),
        ("backbone_settings.name=tiny-qwen3-vl",),
    ],
)
def test_every_way_to_train_moves_every_part(tmp_path, more):
    before = {n: p.detach().clone() for n, p in build_model(settings(*more)).named_parameters() if p.requires_grad}
    after, losses = run(tmp_path / "run", "train.max_steps=1", "method_settings.disc_reinit_prob=0", *more)
    assert all(math.isfinite(loss) for loss in losses)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name.split(".")[0] for name in before}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_what_one_trains(tmp_path):
    overrides = [part for one in (*SMALL, "train.max_steps=3") for part in ("--set", one)]
    given = ["train", "vlm_pruning", *overrides, "--log-format", "plain"]
    assert cli([*given, "--out", str(tmp_path / "one")]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "truebatch", *given, "--devices", "2", "--out", str(tmp_path / "two")],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=800, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (load_file(tmp_path / name / "model" / "pruning.safetensors") for name in ("one", "two"))
    assert difference(two, one) <= 1e-5


def test_true_batches_are_compared_with_one_by_one(tmp_path):
    said: list[str] = []
    config = settings("train.true_batch=compare", "train.max_steps=2", "train.compare_steps=1")
    train_system(VLM_PRUNING, config, Start(out=tmp_path / "run", target="vlm_pruning", say=said.append))
    assert any("differ from one by one by" in line for line in said)


def test_the_backbone_can_be_trained_first_and_pruned_then(tmp_path):
    train_system(VLM_PRUNING, settings("method_settings.stage=backbone"), Start(out=tmp_path / "base"))
    pruned = settings(f"backbone_settings.name={tmp_path / 'base' / 'model'}", "train.max_steps=1")
    train_system(VLM_PRUNING, pruned, Start(out=tmp_path / "pruned"))
    assert (tmp_path / "pruned" / "model" / "pruning.safetensors").exists()


@pytest.mark.parametrize("epochs", [1, 3])
def test_schedules_are_closed_forms_of_one_clock(epochs):
    method = MethodSettings(sparsity_weight=1.0, sparsity_weight_max=3.0, sparsity_warmup_ratio=0.5)
    config = settings(f"train.epochs={epochs}")
    total = num_steps(config, 12)
    assert total == 3 * epochs
    objective = PruningObjective(method=method)
    clock = Clock(objective, 100 * epochs)
    for share, temperature, task, budget in (
        (0.0, 0.4, 60.0, 1.0),
        (0.25, 0.275, 60 - 20 * (1 - math.cos(math.pi * 0.25 / 0.3)) / 2, 2.0),
        (0.5, 0.15, 40.0, 3.0),
        (1.0, 0.15, 40.0, 3.0),
    ):
        clock.before_step(int(share * 100 * epochs))
        moment = moment_at(method, objective.progress)
        assert moment.temperature == pytest.approx(temperature)
        assert moment.task == pytest.approx(task)
        assert moment.budget == pytest.approx(budget)
    assert all(moment_at(method, progress_of(s, 10)).temperature <= 0.4 for s in range(-5, 30))


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_learning_rate_is_a_closed_form_of_the_same_clock(epochs):
    """The shape of the note: up in a line, down in a cosine to a share of the top; longer runs only stretch it."""
    config = settings(f"train.epochs={epochs}", "train.warmup_steps=10", "train.schedule=cosine")
    schedule, total = config.train.lr_schedule(), 100 * epochs
    least = config.train.min_learning_rate / config.train.learning_rate
    for step in (10, total // 4, total // 2, total - 1):
        done = (step - 10) / (total - 11)
        expected = least + (1 - least) * (1 + math.cos(math.pi * done)) / 2
        assert schedule.factor(step, total) == pytest.approx(expected)
    assert [schedule.factor(step, total) for step in (0, 4, 9)] == pytest.approx([1 / 11, 5 / 11, 10 / 11])
    assert schedule.factor(total - 1, total) == pytest.approx(least)


def test_weights_that_are_missing_extra_or_of_another_shape_are_refused(tmp_path):
    run(tmp_path / "run", "train.max_steps=1", "train.save_every=1")
    assert open_trained(tmp_path / "run").step == 1
    for layers in ("[1]", "[1,2,3]"):
        with pytest.raises(RunError, match="do not belong"):
            open_trained(tmp_path / "run", [f"method_settings.pruning_layers={layers}"])
    with pytest.raises(RunError, match="do not belong"):
        open_trained(tmp_path / "run", ["method_settings.pruner_d_internal=32"])


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["soft", "straight_through"])
def test_ten_and_ten_steps_are_twenty(tmp_path, choice):
    given = (
        "train.epochs=7",
        "train.max_steps=20",
        "dataset_settings.validation=0",
        f"method_settings.choice={choice}",
    )
    weights, losses = run(tmp_path / "straight", *given)
    run(tmp_path / "parts", *given, "train.save_every=10")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-20")
    resumed, rest = run(tmp_path / "parts", *given, "train.save_every=10")
    assert len(losses) == 20
    assert rest == pytest.approx(losses[10:], rel=1e-6)
    assert difference(resumed, weights) <= 1e-6


def test_a_fresh_discriminator_has_a_fresh_optimiser():
    model = build().train()
    config = settings("method_settings.disc_reinit_prob=0.5")
    groups = {g.name: g for g in make_groups(config, model)}
    batch = batch_of(encode(samples(2)))
    with noise_for(batch, seed=0):
        terms = sample_terms(model, batch, temperature=1.0, terms=PruningObjective(method=METHOD).terms)
    terms["discriminator"].sum().backward()
    optimiser = groups["discriminator"].optimiser
    optimiser.step()
    before = model.discriminator.first.weight.detach().clone()
    assert optimiser.state
    begin_anew(model, optimiser, seed=3)
    assert not optimiser.state
    assert not torch.equal(before, model.discriminator.first.weight)
    judge = FreshJudge(model, optimiser, chance=0.5, seed=1)
    drawn = []
    for step in range(40):
        was = model.discriminator.first.weight.detach().clone()
        judge.before_step(step)
        drawn.append(not torch.equal(was, model.discriminator.first.weight))
    assert 8 < sum(drawn) < 32


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("method_settings.pruning_layers=[5]", "layers behind it"),
        ("method_settings.target_sparsity=0.9", "budget"),
        ("method_settings.disc_target_layers=[-1,-2,-9]", "does not have"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(override, word):
    with pytest.raises(ConfigError, match=word):
        build_model(settings(override))


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("method_settings.choice=top_k", "every sample"),
        ("method_settings.sparsity_weight_max=9.0", "schedule of its own"),
        ("method_settings.sparsity_weight=0.0", "sparsity_weight"),
    ],
)
def test_a_budget_on_average_is_not_taken_with_what_it_does_not_follow(override, word):
    with pytest.raises(ConfigError, match=word):
        settings("method_settings.budget_of=average", override)


def test_a_run_whose_tokens_have_a_price_is_judged_at_its_end_only(tmp_path):
    priced = ("method_settings.budget_of=average", "method_settings.teacher=none", "train.epochs=2")
    train_system(VLM_PRUNING, settings(*priced), Start(out=tmp_path / "run", target="vlm_pruning"))
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [one["step"] for one in records if "validation_loss" in one] == [6]
    trained = open_trained(tmp_path / "run").model
    assert float(trained.log_price.detach()) != pytest.approx(math.log(9.0), rel=1e-6)
    assert at_budget(trained, 0.5).log_price is None


def test_layers_left_open_are_those_of_the_note_in_proportion():
    whole = MethodSettings().for_depth(32)
    assert whole.pruning_layers == (5, 10, 15, 20)
    assert whole.disc_target_layers == (-2, -5, -8)
    small = MethodSettings().for_depth(6)
    assert small.pruning_layers == (1, 2, 3, 4)
    assert small.disc_target_layers == (-1, -2, -3)
    assert small.for_depth(32) == small
    assert MethodSettings().for_depth(2).pruning_layers == (0,)


def test_a_run_with_defaults_alone_begins(tmp_path):
    config = load_config(settings_type(VLM_PRUNING), None, overrides=["train.max_steps=1", "train.limit=10"])
    result = train_system(VLM_PRUNING, config, Start(out=tmp_path / "run", target="vlm_pruning"))
    assert result.step == 1
