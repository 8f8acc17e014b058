"""A system as a run: one file of settings, frozen parameters, the model that is exported."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from tests import tasks
from truebatch.config.load import load_config
from truebatch.errors import CheckpointError, ConfigError
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, first_samples
from truebatch.training.system import System, TaskCommands
from truebatch.training.train_system import Start, settings_type, train_system

KIND = settings_type(tasks.system)


def config_of(**train):
    return KIND(train=TrainConfig(samples_per_step=4, **train))


def test_one_file_holds_the_settings_of_the_system_and_of_training(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("width: 5\ntrain:\n  epochs: 3\n")
    config = load_config(KIND, file, overrides=["train.seed=7"])
    assert isinstance(config, tasks.Settings)
    assert (config.width, config.train.epochs, config.train.seed) == (5, 3, 7)
    assert isinstance(hash(config), int)


def test_settings_that_are_no_dataclass_or_have_a_train_of_their_own_are_refused():
    @dataclass
    class Taken:
        train: int = 1

    for kind in (dict, Taken):
        with pytest.raises(
            ConfigError, match="must be a dataclass, and `train` in it must hold the settings of training"
        ):
            settings_type(replace(tasks.system, config_type=kind))


def test_a_field_train_gives_the_defaults_of_training_and_the_type_is_the_systems_own():
    @dataclass(frozen=True, kw_only=True)
    class Quick(TrainConfig):
        epochs: int = 9

    @dataclass(frozen=True, kw_only=True)
    class Whole:
        train: Quick = field(default_factory=Quick)

    system = replace(tasks.system, config_type=Whole)
    assert settings_type(system) is Whole
    assert settings_type(system)().train.epochs == 9


def test_a_system_in_the_former_form_is_shown_the_new_one():
    with pytest.raises(ConfigError, match="one function `prepare`") as caught:
        System(name="old", config_type=tasks.Settings, load=tasks.Samples, measure=tasks.measure)
    assert caught.value.seen == "System(load=..., measure=...)"
    assert "docs/migration.md" in caught.value.do


def changed(**parts):
    """The system with some parts of its tasks replaced."""
    return replace(tasks.system, prepare=lambda config: replace(tasks.prepare(config), **parts))


def frozen(value: float):
    def build():
        model = tasks.build(tasks.Settings())
        with torch.no_grad():
            model.embed.weight.add_(value)
        model.embed.weight.requires_grad_(False)
        return model

    return changed(build_model=build)


def test_frozen_parameters_are_not_written_and_must_be_the_same_again(tmp_path):
    start = Start(out=tmp_path / "run")
    train_system(frozen(0.0), config_of(max_steps=2), start)
    parts = load_newest(tmp_path / "run/checkpoints").checkpoint.parts
    assert set(parts["model"]) == {"head.weight", "head.bias"}
    result = train_system(frozen(0.0), config_of(max_steps=4), start)
    assert [record["step"] for record in result.records] == [3, 4]
    with pytest.raises(CheckpointError, match=r"the frozen parameter 'embed\.weight' is not what it was"):
        train_system(frozen(0.01), config_of(max_steps=6), start)


def test_a_model_is_exported_again_if_the_export_was_lost(tmp_path):
    start = Start(out=tmp_path / "run")
    train_system(tasks.system, config_of(max_steps=2), start)
    weights = tmp_path / "run/model/weights.pt"
    before = torch.load(weights, weights_only=True)
    weights.unlink()
    weights.parent.rmdir()
    (tmp_path / "run/model.part").mkdir()
    train_system(tasks.system, config_of(max_steps=2), start)
    after = torch.load(weights, weights_only=True)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not (tmp_path / "run/model.part").exists()


def test_the_layout_a_system_chooses_is_the_one_of_the_run(tmp_path):
    said = []
    system = changed(commands=TaskCommands(choose_layout=lambda model: ("packed", "layout: packed, because")))
    given = config_of(max_steps=2)
    train_system(system, config_of(max_steps=2, choose=("layout",)), Start(out=tmp_path / "open", say=said.append))
    assert "layout: packed, because" in said
    assert "layout: packed" in (tmp_path / "open/config.yaml").read_text()
    train_system(system, given, Start(out=tmp_path / "given"))
    assert "layout: padded" in (tmp_path / "given/config.yaml").read_text()


def test_a_run_that_goes_on_keeps_its_layout_and_times_nothing(tmp_path):
    answers = iter([("packed", "first"), ("padded", "second")])
    system = changed(commands=TaskCommands(choose_layout=lambda model: next(answers)))
    said = []
    start = Start(out=tmp_path / "run", say=said.append)
    train_system(system, config_of(max_steps=2, choose=("layout",)), start)
    assert f"run: {tmp_path / 'run'} (packed rows, seed 0)" in said
    said.clear()
    train_system(system, config_of(max_steps=4, choose=("layout",)), start)
    assert "layout: packed, as the run began" in said
    assert f"run: {tmp_path / 'run'} (packed rows, seed 0)" in said
    train_system(system, config_of(max_steps=4, choose=("layout",)), replace(start, fresh=True))
    assert "second" in said


def test_first_samples_are_the_first_and_never_more():
    data = TrainData(samples=tasks.Samples(tasks.Settings()), fields=tasks.FIELDS)
    assert first_samples(data, None) is data
    assert first_samples(data, 24) is data
    some = replace(data, measured=tasks.measure(data.samples))
    few = first_samples(some, 3)
    assert len(few.samples) == 3
    assert few.measured.lengths.tolist() == some.measured.lengths[:3].tolist()
    assert few.measured.fingerprint != some.measured.fingerprint
