"""Actors of a Ray cluster judge together; one that is killed loses nothing."""

from __future__ import annotations

import sys
import threading

import pytest

from truebatch.errors import ConfigError
from truebatch.scoring import raybackend
from truebatch.scoring.calling import ScoreCall
from truebatch.scoring.exporting import read_rows
from truebatch.scoring.listing import list_samples
from truebatch.scoring.raybackend import Judge, RayBackend
from truebatch.scoring.running import Limits, Running, run_samples
from truebatch.scoring.wire import pack_asked

CALL = ScoreCall(model="scripted").to_dict()


def test_what_runs_in_an_actor_answers_for_every_sample():
    judge = Judge(CALL)
    samples = [one.asked for one in list_samples([{"user": "abc"}, {"user": "x", "options": {"fail": "too_long"}}])]
    good, bad = judge.judge([pack_asked(one) for one in samples])
    assert (good["score"], bad["kind"]) == (3.0, "too_long")
    assert judge.cost(pack_asked(samples[0]))["tokens"] == 4
    assert judge.describe()["backend"] == "scripted"


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs the package ray"):
        raybackend._library()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_two_actors_one_of_them_killed_judge_every_sample(tmp_path):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=8, logging_level="ERROR", log_to_driver=False, include_dashboard=False)
    try:
        backends = [RayBackend(CALL), RayBackend(CALL)]
        data = [{"user": f"{n:03d}"} for n in range(60)]
        killed = threading.Event()

        def kill(progress):
            if progress.done and not killed.is_set() and backends[1]._actor is not None:
                killed.set()
                ray.kill(backends[1]._actor)

        data += [{"user": "bad", "options": {"fail": "exit"}}]
        run_samples(list_samples(data), backends, tmp_path, Limits(cells=16), Running(watch=kill))
        rows = list(read_rows(tmp_path))
        assert [row["score"] for row in rows[:60]] == [3.0] * 60
        assert rows[60]["kind"] == "crashed"
        assert killed.is_set()
        assert sum(backend.starts for backend in backends) > 3
    finally:
        ray.shutdown()
