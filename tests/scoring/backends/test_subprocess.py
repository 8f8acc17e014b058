"""A worker that crashes or hangs is replaced, and only the sample that is to blame is recorded."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from PIL import Image

from tests.scoring.test_runner import six_kinds
from truebatch.errors import ConfigError
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.backends.protocol import (
    decode,
    encode,
    pack_request,
    pack_response,
    unpack_request,
    unpack_response,
)
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.backends.subprocess import WorkerBackend, WorkerHang, WorkerSettings
from truebatch.scoring.backends.worker import BackendService
from truebatch.scoring.bisect import FailureStats, judge_all
from truebatch.scoring.equality_check import unpack_report
from truebatch.scoring.readouts import Generate, Labels, Words, YesNo
from truebatch.scoring.readouts.scale import ANY_NUMBER
from truebatch.scoring.runner import Limits, RunConfig, run_samples
from truebatch.scoring.spec import ScoreCall, make_readout, open_backends
from truebatch.scoring.store.export import read_rows
from truebatch.scoring.store.input_index import list_samples

FAKE = textwrap.dedent(
    """
    import json, os, sys, time
    def say(**value): sys.stdout.write(json.dumps(value) + "\\n"); sys.stdout.flush()
    call = json.loads(sys.stdin.readline())
    if call["model"] == "none":
        say(refused={"wrong": "no such model", "seen": "none", "do": "name one"}); sys.exit(2)
    if call["model"] == "ill":
        sys.exit("cannot import anything")
    if call["model"] == "late": time.sleep(0.5)
    if call["model"] == "mute": say(ready=1); time.sleep(60)
    say(ready=1)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "describe":
            say(describe={"model": "fake"})
        elif request["do"] == "cost":
            say(costs=[{"tokens": len(s["user"]), "new_tokens": 0, "patches": 0} for s in request["samples"]])
        else:
            users = [s["user"] for s in request["samples"]]
            if "crash" in users: sys.stderr.write("segmentation fault, it said"); sys.stderr.flush(); os._exit(7)
            if "once" in users and not os.path.exists(sys.argv[0] + ".died"):
                open(sys.argv[0] + ".died", "w").close(); os._exit(7)
            if "silent" in users: time.sleep(60)
            while "busy" in users: say(beat=1); time.sleep(0.05)
            if "raise" in users: say(error="RuntimeError: it raised", memory=False); continue
            if "large" in users: say(error="too much", memory=True); continue
            if "print" in users: sys.stdout.write("x" * (1 << 20) + "\\n5\\n"); sys.stdout.flush()
            if "deaf" in users: os.close(1); time.sleep(60)
            if "few" in users: users = users[1:]
            answers = [{"score": len(u), "output": {}, "tokens": 1} for u in users]
            if "many" in users: say(answers=answers, number=request["number"])
            say(answers=answers, number=request["number"])
    """
)


@pytest.fixture
def worker(tmp_path):
    """A worker program of the standard library alone: it starts in no time and dies as asked."""
    (tmp_path / "fakeworker.py").write_text(FAKE)
    made = []

    def make(model="fake", **more):
        settings = WorkerSettings(module="fakeworker", environment={"PYTHONPATH": str(tmp_path)}, **more)
        made.append(WorkerBackend({"model": model}, settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(*users):
    return [ScoreRequest(id=user, user=user) for user in users]


def test_a_crash_costs_only_the_sample_that_caused_it(worker, tmp_path):
    backend = worker()
    users = [*(f"good{n}" for n in range(9)), "crash", "once", "raise"]
    done = run_samples(list_samples(users), [backend], tmp_path / "run", Limits(), RunConfig())
    rows = {row["output"].get("said", user): row for user, row in zip(users, read_rows(tmp_path / "run"), strict=True)}
    assert {user: row["kind"] for user, row in rows.items() if row["status"] == "failed"} == {
        "crash": "crashed", "raise": "raised",
    }  # fmt: skip
    assert "segmentation fault" in rows["crash"]["message"]
    assert rows["once"]["score"] == 4.0
    assert backend.starts > 3
    assert done.trouble.bisections > 0


def test_a_single_sample_is_tried_twice_before_it_is_blamed(worker):
    backend = worker()
    (answer,) = backend.judge(ask("once"))
    assert answer.score == 4.0
    assert backend.starts == 2


@pytest.mark.parametrize("user", ["busy", "silent"])
def test_a_worker_that_hangs_is_killed_and_replaced(worker, user):
    backend = worker(timeout=2.0, silence=1.5)  # one that works is a thousand times as fast
    with pytest.raises(WorkerHang):
        backend.judge(ask(user))
    (outcome,) = judge_all(backend.judge, ["k"], ask(user), FailureStats())
    assert outcome.kind == "hung"
    assert backend.judge(ask("fine"))[0].score == 4.0


def test_a_worker_may_print_and_one_that_closes_its_stdout_is_replaced(worker, monkeypatch):
    monkeypatch.setattr("truebatch.scoring.backends.subprocess._LAST_SECONDS", 0.2)
    backend = worker()
    assert [answer.score for answer in backend.judge(ask("print", "fine"))] == [5.0, 4.0]
    (outcome,) = judge_all(backend.judge, ["k"], ask("deaf"), FailureStats())
    assert outcome.kind == "crashed"
    assert backend.judge(ask("good"))[0].score == 4.0


def test_too_few_answers_are_a_failure_and_one_too_many_is_never_taken_for_the_next(worker):
    backend = worker()
    outcomes = judge_all(backend.judge, ["a", "b", "c"], ask("fine", "few", "good"), FailureStats())
    assert [outcome.kind or outcome.score for outcome in outcomes] == [4.0, "raised", 4.0]
    assert backend.judge(ask("many"))[0].score == 4.0
    assert backend.judge(ask("another one"))[0].score == 11.0


def test_out_of_memory_in_a_worker_is_out_of_memory_here(worker):
    (outcome,) = judge_all(worker().judge, ["k"], ask("large"), FailureStats())
    assert outcome.kind == "out_of_memory"


def test_what_a_worker_refuses_is_said_and_one_that_cannot_start_too(worker):
    with pytest.raises(ConfigError, match="no such model"):
        worker("none").describe()
    with pytest.raises(ConfigError, match="does not start"):
        worker("ill").describe()
    with pytest.raises(ConfigError, match="a worker failed"):
        worker("mute", silence=0.2).describe()


def test_a_worker_may_be_silent_while_it_starts(worker):
    assert worker("late", silence=0.2).describe() == {"model": "fake"}


def test_several_workers_share_the_batches(worker, tmp_path):
    users = [f"{n:02d}" + "x" * (n % 7) for n in range(40)]
    workers = [worker(), worker(), worker()]
    run_samples(list_samples(users), workers, tmp_path / "run", Limits(cells=16), RunConfig())
    assert [row["score"] for row in read_rows(tmp_path / "run")] == [float(len(user)) for user in users]


def test_samples_and_answers_survive_the_wire():
    picture = Image.new("RGB", (3, 2), "red")
    sample = ScoreRequest(
        id="好", user="u\ud800", messages=({"role": "user", "content": "x"},), images=(picture, b"xy", "p.png")
    )
    back = unpack_request(decode(encode(pack_request(sample))))
    assert (back.id, back.user, back.images[1:]) == ("好", "u\ud800", (b"xy", "p.png"))
    assert Image.open(io.BytesIO(back.images[0])).tobytes() == picture.tobytes()
    answer = ScoreResponse(score=0.1, output={"a": [1]}, tokens=3)
    assert unpack_response(decode(encode(pack_response(answer)))) == answer
    error = unpack_response(decode(encode(pack_response(SampleError("parse", "unparsable", "m", {"text": "t"})))))
    assert (error.stage, error.kind, str(error), error.output) == ("parse", "unparsable", "m", {"text": "t"})


def test_the_other_end_answers_for_every_sample_and_tells_what_raised():
    backend = ScriptedBackend()
    good, long = ScoreRequest(id="a", user="abc"), ScoreRequest(id="b", user="x", options={"fail": "too_long"})
    bad = ScoreRequest(id="c", user="y", options={"fail": "raise"})
    service = BackendService(lambda: backend)
    found = service.answer({"do": "judge", "samples": [pack_request(long), pack_request(good)]})
    assert [unpack_response(a).__class__ for a in found["answers"]] == [SampleError, ScoreResponse]
    found = service.answer({"do": "judge", "samples": [pack_request(good), pack_request(bad)]})
    assert "device-side assert" in found["error"]
    samples = [pack_request(ScoreRequest(id=str(n), user="x" * n)) for n in range(1, 9)]
    checked = service.answer({"do": "check", "samples": samples, "n": 4, "tolerance": None})
    assert unpack_report(checked["report"]).ok
    assert unpack_report(checked["report"]).samples == 4
    assert service.answer({"do": "fit", "samples": samples}) == {"cells": None}
    costs = service.answer({"do": "cost", "samples": [pack_request(good)]})["costs"]
    assert Cost(**costs[0]) == backend.cost(good)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_workers_find_the_samples_that_end_the_interpreter_among_one_percent_of_bad_ones(tmp_path):
    data, expected = six_kinds(tmp_path, 800)
    ends = {"exit": data[100], "segfault": data[700]}
    for way, sample in ends.items():
        sample["options"] = {"fail": way}
        expected[sample["id"]] = "crashed"
    call = ScoreCall(model="scripted", workers=2)
    backends = open_backends(call)
    try:
        run_samples(list_samples(data), backends, tmp_path / "run", Limits(cells=1000), RunConfig())
    finally:
        for backend in backends:
            backend.close()
    rows = list(read_rows(tmp_path / "run"))
    assert {row["id"]: row["kind"] for row in rows if row["status"] == "failed"} == expected
    assert all(row["score"] == len(one["user"]) for row, one in zip(rows, data, strict=True) if row["status"] == "ok")
    assert set(expected.values()) == {
        "truncated_image", "unreadable_image", "too_long", "nonfinite", "raised", "out_of_memory", "crashed",
    }  # fmt: skip
    told = {row["id"]: row["message"] for row in rows if row["kind"] == "crashed"}
    assert "exit code 41" in told[ends["exit"]["id"]]
    assert "signal 11" in told[ends["segfault"]["id"]]
    assert sum(backend.starts for backend in backends) > 2


def test_a_call_is_plain_values_and_makes_every_readout():
    call = ScoreCall(model="m", readout={"kind": "labels", "values": {"a": 1, "b": 0}})
    assert ScoreCall(**decode(encode(call.to_dict()))) == call
    assert make_readout(call.readout) == Labels({"a": 1, "b": 0})
    assert make_readout({"kind": "yesno", "prefix": "{"}) == YesNo(prefix="{")
    assert make_readout({"kind": "words", "words": ["a", "b"]}) == Words(["a", "b"])
    made = make_readout({"kind": "generate", "max_new_tokens": 5, "stop": ["\n"], "parse": "number"})
    assert isinstance(made, Generate)
    assert (made.settings.max_new_tokens, made.settings.stop, made.scale) == (5, ("\n",), ANY_NUMBER)
    made = make_readout({"kind": "generate", "parse": "number", "scale": "0..5", "structured": "json", "step": 2.5})
    assert made.choices() == ('{"score": 0}', '{"score": 2.5}', '{"score": 5}')
    for wrong in ({"kind": "nothing"}, {"kind": "generate", "parse": "json"}):
        with pytest.raises(ConfigError, match="unknown"):
            make_readout(wrong)


ALONE = """
import os, signal
from truebatch.scoring.spec import ScoreCall, open_backends
(backend,) = open_backends(ScoreCall(model="scripted", workers=1))
backend.describe()
pid = backend.transport.process.pid
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
    os.kill(pid, getattr(signal, name))
backend.describe()
print(pid, backend.starts, os.getpgid(pid) == os.getpgid(0), flush=True)
os._exit(9)
"""


def test_a_worker_leaves_signals_to_the_run_and_ends_when_that_is_gone():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 9, done.stderr
    pid, starts, is_in_its_group = done.stdout.split()
    assert (starts, is_in_its_group) == ("1", "False")
    until = time.monotonic() + 600
    while is_alive(int(pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(int(pid))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # not every container has a process that reaps them
    except psutil.NoSuchProcess:
        return False
