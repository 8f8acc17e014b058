"""Actors of a Ray cluster judge together; one that is killed loses nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest

from truebatch.errors import ConfigError
from truebatch.scoring.backends import ray as raybackend
from truebatch.scoring.backends.interface import ScoreRequest
from truebatch.scoring.backends.protocol import decode, encode, pack_request, unpack_outcome
from truebatch.scoring.backends.ray import JudgeActor, RayBackend, RaySettings, located
from truebatch.scoring.backends.remote import WorkerCrash, WorkerHang
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.bisect import FailureStats
from truebatch.scoring.ray_engine import JudgeBatches, RayEngine, _request, ray_engine
from truebatch.scoring.resume import Work
from truebatch.scoring.runner import RunConfig, run_samples
from truebatch.scoring.spec import ScoreCall
from truebatch.scoring.store.export import export, read_rows
from truebatch.scoring.store.input_index import list_samples

CALL = ScoreCall(model="scripted").to_dict()
LIMITS = Limits(cells=40)
PACKAGES = Path(__file__).parents[3] / ".real" / "ray"
"""Where `make real` puts Ray, beside the environment: most who test this project have no use for it."""


def asked(*values):
    return [one.asked for one in list_samples(values)]


def test_what_runs_in_an_actor_answers_for_every_sample():
    judge = JudgeActor(CALL)
    samples = asked({"user": "abc"}, {"user": "x", "options": {"fail": "too_long"}})
    good, bad = judge.answer({"do": "judge", "samples": [pack_request(one) for one in samples]})["answers"]
    assert (good["score"], bad["kind"]) == (3.0, "too_long")
    assert judge.answer({"do": "cost", "samples": [pack_request(samples[0])]})["costs"][0]["tokens"] == 4
    assert judge.answer({"do": "describe"})["describe"]["backend"] == "scripted"
    refused = JudgeActor({**CALL, "model": "nowhere"})
    assert "model folder" in refused.greet()["refused"]["wrong"]
    with pytest.raises(ConfigError, match="model folder"):
        refused.answer({"do": "describe"})


def test_an_actor_of_the_pool_isolates_faults_by_itself():
    users = [{"user": f"{n}"} for n in range(6)]
    users[2]["options"], users[4]["options"] = {"fail": "raise"}, {"fail": "too_long"}
    listed = list_samples(users)
    samples = {one.key: one.asked for one in listed}
    work = Work(3, tuple(samples), 1)
    pool = JudgeBatches(CALL, 60.0)
    (answer,) = map(decode, pool({"request": [encode(_request(work, samples, {}))]})["done"])
    outcomes = [unpack_outcome(one) for one in answer["outcomes"]]
    assert [one.kind or one.score for one in outcomes] == [1.0, 1.0, "raised", 1.0, "too_long", 1.0]
    assert (answer["number"], tuple(answer["keys"])) == (3, work.keys)
    assert FailureStats(**answer["trouble"]).bisections > 0
    (answer,) = map(decode, JudgeBatches({**CALL, "model": "nowhere"}, 60.0)({"request": [encode({})]})["done"])
    assert "model folder" in answer["refused"]["wrong"]


class FakePool(RayEngine):
    """An engine without a cluster whose pool loses some batches and gives the others back in another order."""

    def _pool(self, requests):
        judge = JudgeBatches(CALL, 60.0)
        for request in requests[::-1]:
            if request["number"] % 3:
                yield decode(judge({"request": [encode(request)]})["done"][0])


class Closing(ScriptedBackend):
    noted: ClassVar[set[str]] = set()

    def prepare(self, sample):
        return sample

    def note_slower(self, lines):
        self.noted.update(lines)


def test_what_the_pool_loses_is_judged_all_the_same_and_the_export_is_that_of_one_process(tmp_path):
    data = [{"id": f"s{n}", "user": f"{n:02d}" + "x" * (n % 9)} for n in range(60)]
    data[7]["options"] = {"fail": "raise"}
    run_samples(list_samples(data), [ScriptedBackend()], tmp_path / "one", LIMITS, RunConfig())
    engine = FakePool(CALL, 2, RaySettings(), Closing())
    run_samples(list_samples(data), [ScriptedBackend()], tmp_path / "pool", LIMITS, RunConfig(engine=engine))
    assert exported(tmp_path / "pool") == exported(tmp_path / "one")
    assert len(list((tmp_path / "pool" / "journal").glob("worker-0-engine*.db"))) == 1


def test_a_quick_way_that_is_not_taken_in_an_actor_is_said_by_the_run(tmp_path, monkeypatch, fake_ray):
    monkeypatch.setattr(ScriptedBackend, "slower_ways", lambda self: ["a reason"], raising=False)
    monkeypatch.setattr(Closing, "noted", set())
    how = RunConfig(engine=FakePool(CALL, 2, RaySettings(), Closing()))
    run_samples(list_samples([{"user": f"{n}" * n} for n in range(1, 40)]), [ScriptedBackend()], tmp_path, LIMITS, how)
    assert Closing.noted == {"a reason"}
    backend = RayBackend(CALL)
    assert backend.slower_ways() == [], "no actor was asked for anything yet"
    backend.note_slower(["a reason of the pool"])
    backend.judge(asked({"user": "abc"}))
    assert backend.slower_ways() == ["a reason of the pool", "a reason"]
    backend.close()
    assert backend.slower_ways() == ["a reason of the pool", "a reason"]


class FakeRay:
    """As much of Ray as a transport asks for; judging `j` ends the actor, judging `jk` hangs it."""

    class exceptions:
        GetTimeoutError, RayActorError, RayTaskError = (type(name, (Exception,), {"cause": None}) for name in "abc")

    def __init__(self):
        self.killed = []

    def remote(self, **_options):
        return lambda kind: SimpleNamespace(remote=lambda *given: FakeActor(kind(*given)))

    def get(self, call, timeout=None):
        request = call.given[0] if call.given else {"do": "greet"}
        users = [sample["user"] for sample in request.get("samples", ())] if request["do"] in ("judge", "check") else []
        if "j" in users:
            raise self.exceptions.RayActorError("the actor died\nand more")
        if "jk" in users:
            raise self.exceptions.GetTimeoutError
        return call.run(*call.given)

    def kill(self, actor):
        self.killed.append(actor)


class FakeActor:
    def __init__(self, made):
        self.made = made

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *given: SimpleNamespace(run=getattr(self.made, name), given=given))


@pytest.fixture
def fake_ray(monkeypatch):
    ray = FakeRay()
    monkeypatch.setattr(raybackend, "ray_library", lambda: ray)
    return ray


def test_an_actor_that_dies_or_hangs_is_replaced_and_what_it_raises_is_told(fake_ray):
    backend = RayBackend(CALL)
    assert backend.describe()["backend"] == "scripted"
    assert [one.score for one in backend.judge(asked({"user": "abc"}, {"user": "ab"}))] == [3.0, 2.0]
    assert backend.starts == 1
    with pytest.raises(WorkerCrash, match=r"^the actor died$"):
        backend.judge(asked({"user": "j"}))
    assert (backend.starts, len(fake_ray.killed)) == (2, 2)  # a single sample is tried a second time
    with pytest.raises(WorkerCrash):
        backend.judge(asked({"user": "j"}, {"user": "abc"}))
    with pytest.raises(WorkerHang, match="no result within 600 s"):
        backend.judge(asked({"user": "jk"}))
    assert (backend.starts, len(fake_ray.killed)) == (4, 4)
    with pytest.raises(RuntimeError, match="device-side assert"):
        backend.judge(asked({"user": "x", "options": {"fail": "raise"}}))
    with pytest.raises(MemoryError):
        backend.judge(asked({"user": "x", "options": {"fail": "memory"}}))
    report = backend.check(asked(*({"user": "x" * n} for n in range(3, 9)), {"user": "j"}), 7, None)
    assert (report.ok, report.samples) == (True, 6)
    backend.close()
    assert len(fake_ray.killed) == backend.starts


def test_an_actor_that_cannot_open_its_model_says_why(fake_ray):
    backend = RayBackend({**CALL, "model": "nowhere"})
    with pytest.raises(ConfigError, match="model folder"):
        backend.describe()
    assert len(fake_ray.killed) == 1


def test_paths_of_images_are_whole_for_actors_elsewhere():
    sample = located(ScoreRequest(id="a", user="u", images=("a.png", b"xy")))
    assert sample.images == (str(Path("a.png").resolve()), b"xy")


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs the package ray"):
        raybackend.ray_library()


def exported(run):
    export(run, run / "scores.jsonl")
    return (run / "scores.jsonl").read_bytes()


@pytest.fixture
def cluster(monkeypatch):
    """A cluster on this machine with more logical CPUs than workers: Ray's own readers need some."""
    if PACKAGES.is_dir():
        monkeypatch.syspath_prepend(str(PACKAGES))
        monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default workers starve on a machine that has other work
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=8, logging_level="ERROR", log_to_driver=False, include_dashboard=False)
    yield ray
    ray.shutdown()


def kill_one():
    """SIGKILL for one actor of the pool."""
    found = [p for p in psutil.Process().children(recursive=True) if "JudgeBatches" in " ".join(p.cmdline())]
    found[0].kill()
    return found[0].pid


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.filterwarnings("ignore")
def test_two_workers_of_ray_data_one_of_them_killed_make_the_export_of_one_process(cluster, tmp_path):
    data = [{"id": f"s{n}", "user": f"{n:03d}", "options": {"seconds": 0.2}} for n in range(60)]
    run_samples(list_samples(data), [ScriptedBackend()], tmp_path / "one", LIMITS, RunConfig())
    engine = ray_engine(ScoreCall(model="scripted", workers=2, timeout=600))
    killed = []

    def watch(progress):
        if progress.done and not killed:
            killed.append(kill_one())

    how = RunConfig(engine=engine, on_progress=watch)
    run_samples(list_samples(data), [engine.backend], tmp_path / "pool", LIMITS, how)
    assert killed
    assert exported(tmp_path / "pool") == exported(tmp_path / "one")
    data += [{"user": "bad", "options": {"fail": "exit"}}]
    run_samples(list_samples(data), [engine.backend], tmp_path / "pool", LIMITS, RunConfig(engine=engine))
    *_, row = read_rows(tmp_path / "pool")
    assert (row["status"], row["kind"]) == ("failed", "crashed")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
def test_an_actor_that_is_killed_is_replaced(cluster):
    backend = RayBackend(CALL)
    assert backend.judge(asked({"user": "abc"}))[0].score == 3.0
    cluster.kill(backend.transport.actor)
    time.sleep(1)
    assert backend.judge(asked({"user": "abcd"}))[0].score == 4.0
    assert backend.starts == 2
    backend.close()
