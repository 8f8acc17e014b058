"""The drill of memory: a training that runs out of it at random micro-batches ends like one that does not."""

from __future__ import annotations

import json

from truebatch.cli.app import run
from truebatch.testing.drills import kill_drill, oom_drill
from truebatch.testing.drills.kill_drill import DrillTrial
from truebatch.testing.drills.oom_drill import PLACES, run_memory_drill, run_memory_trial
from truebatch.training.memory import oom_retry


def test_memory_may_run_out_at_any_place_of_a_step():
    told = []
    results = run_memory_drill(on_result=told.append)
    assert [result.problem for result in results] == [""] * len(results)
    assert {result.trial.failpoint for result in results} == set(PLACES)
    assert len(results) >= 2 * len(PLACES)
    assert told == list(results)


def test_another_seed_fails_at_other_micro_batches():
    visits = [[r.trial.nth for r in run_memory_drill(seed=seed, visits_each=1)] for seed in (1, 2)]
    assert visits[0] != visits[1]


def test_a_training_that_ends_otherwise_or_stops_is_told(monkeypatch):
    quiet = oom_drill._trained()
    trial = DrillTrial("step.backward", "oom", 2)
    assert run_memory_trial(trial, quiet).problem == ""
    assert "away" in run_memory_trial(trial, quiet * 1.001).problem
    # A training without a guard for its memory does not survive; the drill says so.
    monkeypatch.setattr(oom_retry, "is_out_of_memory", lambda error: False)
    assert "MemoryLimitError" in run_memory_trial(trial, quiet).problem


def test_the_command_lets_memory_run_out_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kill_drill, "FAILPOINTS", [])
    monkeypatch.setattr(oom_drill, "PLACES", ("step.forward",))
    assert run(["doctor", "--drill", "--folder", str(tmp_path), "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [(t["failpoint"], t["action"], t["problem"]) for t in trials] == [("step.forward", "oom", "")] * 3
