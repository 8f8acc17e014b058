"""fit_cuda and oom_cuda: cases by name, what is printed of a case, and where a result comes from."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from benchmarks.harness.script import FOLDER
from benchmarks.pages.tables import missing_origin


def load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fit(monkeypatch):
    return load("fit_cuda", monkeypatch)


def row_of(fit, case, **changes):
    facts = {
        "shape": case.shape, "card_gib": 13.0, "cells": 100, "fullest": 99, "uncertainty": 0.01, "probes": 3,
        "probe_seconds": 1.0, "steps": case.steps, "steps_wanted": case.steps, "seconds": 60.0, "out_of_memory": 0,
        "allocation_retries": 0,
        "predicted_bytes": 101, "peak_bytes": 100, "reserved_bytes": 110, "share_of_limit": 0.9, "share_reserved": 0.95,
        "error": 0.01, "tokens_per_second": 1.0, "fit": {},
    }  # fmt: skip
    return fit.Row(**{**facts, **changes})


def test_cases_are_chosen_by_name_and_the_result_says_where_it_comes_from(fit, tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(fit, "run_case", lambda case, *_, **__: ran.append(case.name) or row_of(fit, case))
    out = tmp_path / "fit.json"
    monkeypatch.setattr(
        sys, "argv", ["fit_cuda.py", "--device", "cpu", "--only", "llama-60m/13,llama-1.1b", "--out", str(out)]
    )
    assert fit.main() == 0
    assert ran == ["llama-1.1b", "llama-60m/13"]
    kept = json.loads(out.read_text())
    assert missing_origin(kept) == []
    assert [case["steps"] for case in kept["config"]["cases"]] == [6, 500]
    said = capsys.readouterr().out
    assert "500 of 500 steps in 60.0 s, memory ran out 0 times (survived), peak 90.0% of the memory" in said
    assert "predicted / real peak 1.0100" in said


def test_an_unknown_case_is_refused_by_name(fit, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fit_cuda.py", "--device", "cpu", "--only", "llama-60m"])
    with pytest.raises(SystemExit):
        fit.main()
    assert "did you mean 'llama-60m/13'" in capsys.readouterr().err


def test_a_figure_that_was_missed_is_a_problem(fit):
    case = fit.FULL[1]
    assert fit.problems([row_of(fit, case)]) == []
    for change in ({"steps": 499}, {"out_of_memory": 1}, {"share_of_limit": 0.84}, {"error": -0.06}):
        assert len(fit.problems([row_of(fit, case, **change)])) == 1


def test_names_of_cases_are_their_own(fit):
    names = [case.name for case in fit.FULL]
    assert len(set(names)) == len(names)
    assert {case.shape for case in fit.FULL} <= set(fit.SHAPES_HERE)


def test_out_of_memory_errors_are_kept_with_their_origin(tmp_path, monkeypatch, capsys):
    oom = load("oom_cuda", monkeypatch)
    monkeypatch.setattr(oom, "measure", lambda config, device: {"errors": config.errors, "problems": ["one"]})
    monkeypatch.setattr(oom.torch, "set_num_threads", lambda _: None)
    out = tmp_path / "oom.json"
    monkeypatch.setattr(sys, "argv", ["oom_cuda.py", "--device", "cpu", "--quick", "--errors", "7", "--out", str(out)])
    assert oom.main() == 1
    kept = json.loads(out.read_text())
    assert missing_origin(kept) == []
    assert (kept["errors"], kept["config"]["errors"], kept["config"]["dim"]) == (7, 7, 32)
    assert json.loads(capsys.readouterr().out) == kept
