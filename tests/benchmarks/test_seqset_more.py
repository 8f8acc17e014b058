"""The benchmarks of speed, risk and long patients, each tiny."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.harness.benchmark import run_benchmark
from benchmarks.systems import seqset_long, seqset_risk, seqset_speed
from tests.systems.seqset_vae.test_formats import write_physionet
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.train_system import Start, train_system
from truebatch_systems.seqset_vae.config import ModelConfig, SeqSetConfig, SeqSetTrainConfig
from truebatch_systems.seqset_vae.data.prepare import prepare
from truebatch_systems.seqset_vae.system import SEQSET_VAE

TINY = ModelConfig(embedding_dim=8, reduced_dim=8, latent_dim=8, inducing_points=2, feedforward_dim=8)


def test_speed_names_the_models_and_measures_the_same_stays(tmp_path):
    line = [
        "--models",
        "tiny",
        "--batch-sizes",
        "1",
        "4",
        "--stays",
        "4",
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "a.json"),
    ]
    assert run_benchmark(seqset_speed.BENCHMARK, line) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["parameters"] == {"tiny": 7144}
    assert {row["stays"] for row in found["rows"]} == {4}
    assert set(found["ratios"]) == {"tiny: batch 1 / batch 1", "tiny: batch 4 / batch 1"}


def test_risk_runs_the_documented_settings_on_a_folder_of_physionet(tmp_path):
    pytest.importorskip("sklearn")
    root = write_physionet(tmp_path / "cinc", number=60)
    line = ["--data", str(root), "--seeds", "0", "--max-steps", "1", "--draws", "5", "--json", str(tmp_path / "a.json")]
    assert run_benchmark(seqset_risk.BENCHMARK, line) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert set(found["auroc"]) == {seqset_risk.LOGISTIC, seqset_risk.BOOSTING, "seqset_vae, seed 0"}
    ours = found["rows"][-1]
    assert (ours["train_stays"], ours["stays"]) == (48, 12)
    assert len(ours["posterior"]["information"]) == 2


def test_a_table_of_summaries_holds_the_last_set_of_every_stay(tmp_path):
    ready = prepare(SeqSetConfig(data=str(write_physionet(tmp_path / "cinc")), summarise=True, model=TINY))
    table = seqset_risk.summary_table(ready.train, len(ready.variables), missing=np.nan)
    sample = ready.train[0]
    size = int(sample["set_size"][-1])
    assert np.flatnonzero(~np.isnan(table[0])).tolist() == sorted(sample["var"][-size:].tolist())


def test_a_long_patient_is_trained_on_whole(tmp_path):
    options = seqset_long.LongOptions(events=(2500, 4000))
    assert seqset_long._write(tmp_path / "patients", options) == [2500, 4000]
    config = SeqSetConfig(
        data=str(tmp_path / "patients"), validation_share=0.0, test_share=0.0, mode="pretrain", model=TINY,
        train=SeqSetTrainConfig(batch_size=1, samples_per_step=1, max_steps=2),
    )  # fmt: skip
    train_system(SEQSET_VAE, config, Start(out=tmp_path / "run"))
    assert sorted(line["tokens"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line) == [
        2500,
        4000,
    ]
