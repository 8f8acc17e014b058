"""Runs of seqset_vae: resumed, cut in any way, watched by the detector, begun from other weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from truebatch.errors import CheckpointError
from truebatch.reports.artifacts import kept_findings
from truebatch.training.checkpoint.retention import kept_step, list_checkpoints
from truebatch.training.checkpoint.store import load_checkpoint, load_newest
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.train_system import Start, train_system
from truebatch_systems.seqset_vae.config import (
    DetectorConfig,
    GeneratorConfig,
    LossConfig,
    ModelConfig,
    SeqSetConfig,
    SeqSetTrainConfig,
)
from truebatch_systems.seqset_vae.data.prepare import prepare
from truebatch_systems.seqset_vae.system import SEQSET_VAE
from truebatch_systems.seqset_vae.train.callbacks import CHECKS, make_probe
from truebatch_systems.seqset_vae.train.loss import weights_at
from truebatch_systems.seqset_vae.train.pretrained_weights import ENCODER_PARTS, load_weights, read_weights

TINY = ModelConfig(
    embedding_dim=8, reduced_dim=6, latent_dim=8, inducing_points=2, feedforward_dim=8, transformer_layers=1
)
STAYS = GeneratorConfig(stays=24, fixed_hours=5.0, num_variables=20)
LOSS = LossConfig(beta_warmup=16, class_warmup=16, recon_decay=64)
DETECTOR = DetectorConfig(check_frequency=2, window=30, enter=2, leave=1)


def config_of(**changes: Any) -> Any:
    train = {"epochs": 20, "samples_per_step": 4, "max_steps": 8, "patience": None, **changes.pop("train", {})}
    parts = {"model": TINY, "generator": STAYS, "loss": LOSS, "detector": DETECTOR, **changes}
    return SeqSetConfig(train=SeqSetTrainConfig(**train), **parts)


def run(folder: Path, config: Any) -> Any:
    return train_system(SEQSET_VAE, config, Start(out=folder))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = load_newest(folder / "checkpoints")
    assert found is not None
    return dict(found.checkpoint.parts["model"])


def assert_equal(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of eight steps without a break."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, config_of())
    return folder


pytestmark = pytest.mark.xdist_group("seqset_training")


def test_a_run_that_was_broken_off_ends_with_the_same_bits(tmp_path):
    at_once = replace(LOSS, beta_warmup=0)  # The grace is a share of a run; without a warm-up it is the same for both.
    whole = tmp_path / "whole"
    run(whole, config_of(loss=at_once))
    run(tmp_path / "run", config_of(loss=at_once, train={"max_steps": 5}))
    run(tmp_path / "run", config_of(loss=at_once))
    one, other = (load_newest(folder / "checkpoints").checkpoint.parts for folder in (whole, tmp_path / "run"))
    assert_equal(one["model"], other["model"])
    assert one["attendants"] == other["attendants"]
    for name, state in one["optimisers"]["main"]["state"].items():
        assert all(torch.equal(state[k], other["optimisers"]["main"]["state"][name][k]) for k in state)
    assert (whole / CHECKS).read_text() == (tmp_path / "run" / CHECKS).read_text()
    first, second = (read_metrics(folder / "metrics.jsonl") for folder in (whole, tmp_path / "run"))
    assert [r["loss"] for r in first if "loss" in r] == [r["loss"] for r in second if "loss" in r]


@pytest.mark.parametrize(
    "train", [{"batch_size": 1}, {"true_batch": "off"}, {"true_batch": "compare"}, {"layout": "packed"}]
)
def test_how_steps_are_cut_does_not_change_a_run(whole, tmp_path, train):
    result = run(tmp_path / "run", config_of(train=train))
    assert result.exit_code == 0
    expected = [r["loss"] for r in read_metrics(whole / "metrics.jsonl") if "loss" in r]
    found = [r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert found == pytest.approx(expected, rel=2e-5)


def test_schedules_follow_the_stays_seen_and_not_the_batches(whole):
    state = load_newest(whole / "checkpoints").checkpoint.parts["attendants"]["loss schedule"]
    assert state["stays_seen"] == 7 * 4  # as the eighth step began
    assert weights_at(LOSS, 8).kl == pytest.approx(LOSS.beta / 2)
    assert weights_at(LOSS, 400).kl == LOSS.beta
    assert weights_at(LOSS, 32).reconstruction == pytest.approx(0.5)
    assert weights_at(LOSS, None) == weights_at(LOSS, 10**9)


def test_checks_are_logged_one_line_each_and_drawn_for_the_report(whole):
    lines = [json.loads(line) for line in (whole / CHECKS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert all(len(line["kl"]) == TINY.levels and line["num_sets"] >= 30 for line in lines)
    assert [line["grace"] for line in lines] == [True, True, False, False]  # Half of the run, though beta rises longer.
    assert [line["end"] for line in lines] == [False, False, False, True]
    pictures = {name: text for name, text in kept_findings(whole) if isinstance(text, str)}
    assert "information" in pictures["40-collapse"]


ALWAYS_BAD = replace(DETECTOR, min_gap=1e9)


def test_stop_ends_the_run_at_the_promised_check_and_leaves_an_earlier_checkpoint(tmp_path):
    config = config_of(detector=replace(ALWAYS_BAD, action="stop"), train={"max_steps": 20, "keep": 1})
    result = run(tmp_path / "run", config)
    # The grace of 4 + 2 steps ends with check 6; checks 8 and 10 are bad, and two are enough.
    assert (result.step, result.exit_code) == (10, 1)
    assert "posterior collapse since step 8" in result.why
    assert kept_step(tmp_path / "run" / "checkpoints") == 6
    assert {saved.step for saved in list_checkpoints(tmp_path / "run" / "checkpoints")} >= {6, 10}
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 1


def test_a_warning_changes_nothing_but_the_log(whole, tmp_path):
    said: list[str] = []
    config = config_of(detector=ALWAYS_BAD, train={"max_steps": 12})
    train_system(SEQSET_VAE, config, Start(out=tmp_path / "run", say=said.append))
    assert sum("posterior alarm" in line for line in said) == 1
    without = config_of(detector=replace(DETECTOR, enabled=False), train={"max_steps": 12})
    run(tmp_path / "other", without)
    assert_equal(weights_of(tmp_path / "run"), weights_of(tmp_path / "other"))
    assert not (tmp_path / "other" / CHECKS).exists()


def test_annealing_lowers_beta_at_every_bad_check_of_an_alarm_and_is_resumed(tmp_path):
    bad = replace(ALWAYS_BAD, action="anneal")
    run(tmp_path / "run", config_of(detector=bad, train={"max_steps": 11}))
    run(tmp_path / "run", config_of(detector=bad, train={"max_steps": 14}))
    lines = [json.loads(line) for line in (tmp_path / "run" / CHECKS).read_text().splitlines()]
    expected = [(6, 1.0), (8, 0.5), (10, 0.25), (12, 0.125), (14, 0.0625)]
    assert [(line["step"], line["beta_factor"]) for line in lines[2:]] == expected
    assert lines[-1]["free_bits_factor"] == 16.0


def test_a_posterior_that_is_dead_at_the_end_is_a_failed_check_even_of_a_run_without_any_other(tmp_path):
    said: list[str] = []
    dead = DetectorConfig(check_frequency=50, active_threshold=1e9)
    result = train_system(SEQSET_VAE, config_of(detector=dead), Start(out=tmp_path / "run", say=said.append))
    assert (result.step, result.exit_code) == (8, 1)
    assert (
        "failed a check at the end: posterior collapse since step 8: in level 1 of 2: 0 of 8 units vary" in result.why
    )
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 1
    assert train_system(SEQSET_VAE, config_of(detector=dead), Start(out=tmp_path / "run")).exit_code == 1


def test_a_healthy_end_is_said_with_its_units_and_nats(tmp_path):
    said: list[str] = []
    result = train_system(SEQSET_VAE, config_of(), Start(out=tmp_path / "run", say=said.append))
    assert result.exit_code == 0
    assert any("posterior is healthy at the end; in level 1: " in line and "in level 2: " in line for line in said)


def test_the_probe_is_made_of_whole_stays_from_all_over_the_data():
    stays = prepare(config_of()).train
    probe = make_probe(stays, 60)
    assert sum(probe.rows("sets").lengths) >= 60
    assert len(set(probe.sample_ids)) == probe.num_samples
    assert max(probe.sample_ids) > len(stays) / 2
    assert make_probe(stays, 10**9).num_samples == len(stays)


def test_fine_tuning_begins_with_all_pretrained_weights_and_leaves_the_latents_alone(tmp_path):
    run(tmp_path / "first", config_of(mode="pretrain", train={"max_steps": 3}))
    said: list[str] = []
    config = config_of(mode="finetune", init_from=tmp_path / "first", train={"max_steps": 3})
    train_system(SEQSET_VAE, config, Start(out=tmp_path / "second", say=said.append))
    before = weights_of(tmp_path / "first")
    assert any(f"{len(before)} tensors loaded" in line for line in said)
    after = SEQSET_VAE.prepare(config).build_model().state_dict()
    parts = ("events.", "encoder.", "decoder.")
    assert all(torch.equal(after[n], before[n]) for n in before if n.startswith(parts))
    trained = weights_of(tmp_path / "second")
    parameters = dict(SEQSET_VAE.prepare(config).build_model().named_parameters())
    assert not any(name in parameters for name in trained if name.startswith(parts))
    assert any(not torch.equal(trained[n], before[n]) for n in trained if n.startswith("layers."))


def test_weights_load_whole_or_not_at_all(whole, tmp_path):
    model = SEQSET_VAE.prepare(config_of()).build_model()
    weights = read_weights(whole)
    report = load_weights(model, weights)
    assert (len(report.loaded), report.new, report.unused) == (len(weights), (), ())
    untouched = {name: value.clone() for name, value in model.state_dict().items()}
    for wrong in (
        {f"set_vae.{name}": value for name, value in weights.items()},
        {name: value for name, value in weights.items() if "encoder.levels.0" not in name},
        {**weights, "norm.weight": torch.ones(3)},
        {**weights, "teacher.weight": torch.ones(3)},
    ):
        with pytest.raises(CheckpointError, match="none were loaded"):
            load_weights(model, wrong)
    assert_equal(model.state_dict(), untouched)
    with pytest.raises(CheckpointError, match="no weights"):
        read_weights(tmp_path)


def test_the_weights_of_a_set_encoder_alone_fill_it_completely(whole):
    weights = {n: v for n, v in read_weights(whole).items() if n.startswith(("events.", "encoder.", "decoder."))}
    config = config_of(model=replace(TINY, transformer_layers=2, head="gaussian_mil"))
    model = SEQSET_VAE.prepare(config).build_model()
    report = load_weights(model, weights, parts=ENCODER_PARTS)
    assert set(report.loaded) == {name for name in model.state_dict() if name.startswith(ENCODER_PARTS)}
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in report.loaded)


def test_another_head_is_new_as_a_whole_and_said_so(whole):
    model = SEQSET_VAE.prepare(config_of(model=replace(TINY, head="gaussian_mil"))).build_model()
    report = load_weights(model, read_weights(whole))
    assert {name.split(".")[0] for name in report.new} == {"head"}
    assert "new: head" in "\n".join(report.lines())


def test_the_exported_model_gives_the_same_weights_back(whole):
    exported = read_weights(whole / "model")
    best = [saved for saved in list_checkpoints(whole / "checkpoints") if saved.is_good]
    assert any(
        all(torch.equal(exported[n], v) for n, v in load_checkpoint(saved.path).parts["model"].items())
        for saved in best
    )
    about = json.loads((whole / "model" / "model.json").read_text())
    assert ModelConfig(**about["model"]) == TINY
    assert np.isfinite(about["std"]).all()
