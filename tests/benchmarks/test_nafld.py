"""The comparison on real persons: run on made-up ones by default, on the real ones in the slow suite."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from benchmarks.systems.nafld import BOOSTING, LOGISTIC, MEAN, OURS, count_and_last, make_config, run_nafld
from truebatch_systems.seqset_vae.config import ModelConfig
from truebatch_systems.seqset_vae.data.admissions import make_stays


@pytest.fixture
def made_up_persons(monkeypatch):
    """A package `survival` with a hundred persons: the old die, and have more tests."""
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(0)
    age = rng.integers(30, 90, 100)
    died = age + rng.normal(0, 8, 100) > 72
    people = {
        "id": list(range(1, 101)), "age": age.tolist(), "male": rng.integers(0, 2, 100).tolist(),
        "weight": [None] * 100, "height": [170] * 100, "bmi": [25.0] * 100, "case.id": list(range(100)),
        "futime": np.where(died, 900, 3000).tolist(), "status": died.astype(int).tolist(),
    }  # fmt: skip
    who = rng.integers(1, 101, 600)
    tests = {
        "id": who.tolist(), "days": rng.integers(-900, 900, 600).tolist(), "test": ["hdl", "chol"] * 300,
        "value": rng.normal(50, 9, 600).tolist(),
    }  # fmt: skip
    events = {"id": [1, 2, 3], "days": [-5, None, 7], "event": ["htn", "htn", "stroke"]}
    package, datasets = ModuleType("survival"), ModuleType("survival.datasets")
    for name, table in (("nafld1", people), ("nafld2", tests), ("nafld3", events)):
        setattr(datasets, f"load_{name}", lambda table=table: table)
    monkeypatch.setitem(sys.modules, "survival", package)
    monkeypatch.setitem(sys.modules, "survival.datasets", datasets)
    monkeypatch.setattr("benchmarks.systems.nafld.version", lambda name: "made up")


def tiny():
    config = make_config(quick=True)
    sizes = ModelConfig(embedding_dim=8, reduced_dim=8, latent_dim=8, feedforward_dim=8, inducing_points=2)
    return replace(config, data=replace(config.data, model=sizes, split_seed=17))


def test_every_way_is_judged_on_the_same_persons_and_written_as_it_comes(made_up_persons, tmp_path):
    said: list[str] = []
    result = run_nafld(tiny(), out=tmp_path / "deep" / "rows.json", say=said.append)
    assert json.loads((tmp_path / "deep" / "rows.json").read_text()) == result
    rows = {row["way"]: row for row in result["rows"]}
    assert list(rows) == [LOGISTIC, BOOSTING, OURS, MEAN]
    assert len(said) == 4
    assert {row["stays"] for row in rows.values()} == {result["stays"]["test"]}
    assert rows[LOGISTIC]["auroc"] > 0.8
    for name in (LOGISTIC, BOOSTING):
        difference = rows[OURS]["auroc_minus"][name]
        assert difference["value"] == pytest.approx(rows[OURS]["auroc"] - rows[name]["auroc"])
        assert difference["low"] <= difference["value"] <= difference["high"]


def test_counts_and_last_values_are_those_of_the_stay():
    sample = {"id": "a", "label": 0, "var": [1, 2, 1], "val": [5, 6, 7], "set_minute": [0, 9], "set_size": [2, 1]}
    table = count_and_last(make_stays([sample]), 4, missing=-1.0)
    assert table.tolist() == [[0, 2, 1, 0, -1, 7, 6, -1]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_persons_are_judged_above_the_known_figure_and_not_worse_than_by_logistic_regression():
    pytest.importorskip("survival.datasets")
    pytest.importorskip("sklearn")
    rows = {row["way"]: row for row in run_nafld(make_config(), out=None, say=lambda line: None)["rows"]}
    assert rows[OURS]["auroc"] >= 0.877
    assert rows[OURS]["auroc_minus"][LOGISTIC]["high"] >= 0
