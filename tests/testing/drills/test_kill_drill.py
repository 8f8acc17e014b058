"""Killed anywhere, a run goes on by itself and ends bit for bit as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from importlib import import_module
from pathlib import Path

import pytest

from truebatch.cli.app import run
from truebatch.errors import TruebatchError
from truebatch.testing.drills import kill_drill, oom_drill
from truebatch.testing.drills.kill_drill import DrillTrial, list_trials, make_fixture, num_visits, run_trial
from truebatch.testing.drills.tiny_run import STEPS, end_of, run_tiny_training
from truebatch.testing.failpoints import ERRORS, FAILPOINTS
from truebatch.training.checkpoint.retention import BEST, best_step, list_checkpoints
from truebatch.training.checkpoint.store import load_newest

DRILLED = [name for name in FAILPOINTS if not name.startswith("journal.")]
"""Everything that is not scoring is visited by the small run of the drill."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return make_fixture(tmp_path_factory.mktemp("drill") / "演 练")


def test_the_small_run_comes_to_every_failpoint(ground):
    assert {name for name in FAILPOINTS if num_visits(ground, name)} == set(DRILLED)
    assert len(DRILLED) >= 40


@pytest.mark.parametrize("part", range(8))
def test_a_kill_at_every_failpoint_is_survived(ground, part):
    # By turns: one checkpoint kept and the last visit but one, with a full folder; or three kept, and the first visit.
    for number, name in list(enumerate(DRILLED))[part::8]:
        (trial,) = list_trials(ground, names=[name], actions=("kill",), keeps=((1, 3)[number % 2],))
        assert run_trial(ground, trial).problem == "", trial


def test_a_kill_at_any_visit_beside_the_mark_leaves_the_best_checkpoint_best(ground):
    """The mark of step 4 is written at the second visit; the checkpoint says itself that it is the best."""
    for name in ("best.before_mark", "best.marked"):
        assert num_visits(ground, name) == 2
        for trial in list_trials(ground, names=[name], actions=("kill",), keeps=(1,), every_visit=True):
            assert run_trial(ground, trial).problem == "", trial


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("name", DRILLED)
def test_a_kill_at_every_visit_of_every_failpoint_is_survived(ground, keep, name, record_property):
    trials = list(list_trials(ground, names=[name], actions=("kill",), keeps=(keep,), every_visit=True))
    for trial in trials:
        assert run_trial(ground, trial).problem == "", trial
    record_property("trials", len(trials))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", DRILLED)
def test_an_error_of_the_disk_at_every_failpoint_is_survived(ground, name, record_property):
    trials = list(list_trials(ground, names=[name], actions=("exit", *ERRORS), keeps=(1, 3)))
    for trial in trials:
        assert run_trial(ground, trial).problem == "", trial
    record_property("trials", len(trials))


def test_a_trial_that_does_not_recover_is_told(ground, monkeypatch):
    for what in ("metrics", "model", "best.json", "files"):
        spoilt = {start: {**end, what: None} for start, end in ground.ends.items()}
        result = run_trial(
            kill_drill.DrillFixture(ground.folder, ground.visits, spoilt),
            DrillTrial("prune.done", "kill", nth=1, keep=2),
        )
        assert f"ended otherwise than the quiet run: {what}" in result.problem
        shutil.rmtree(ground.folder / "prune.done-kill-1-keep2")
    assert "not reached" in run_trial(ground, DrillTrial("prune.done", "kill", nth=999)).problem


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_kills_at_random_times_are_survived(ground, tmp_path, part, record_property):
    draw = random.Random(part)
    for number in range(100):
        folder = tmp_path / str(number)
        shutil.copytree(ground.folder / "go-on", folder)
        keep = draw.choice([1, 3])
        kill_at_random(folder, keep, draw)
        assert load_newest(folder / "run" / "checkpoints") is not None
        assert kill_drill._in_child(kill_drill._attempt, folder, keep, False, "") == 0
        assert end_of(folder / "run") == ground.ends["go-on"]
        shutil.rmtree(folder)
    record_property("trials", 100)


def kill_at_random(folder: Path, keep: int, draw: random.Random) -> None:
    process = kill_drill._context().Process(
        target=kill_drill._child, args=(kill_drill._attempt, (folder, keep, False, ""))
    )
    process.start()
    owner = folder / "run" / ".owner.json"
    before = owner.stat().st_mtime_ns
    while process.is_alive() and owner.stat().st_mtime_ns == before:
        time.sleep(0.0005)
    time.sleep(draw.random() * 0.08)
    process.kill()
    process.join()


# Every call to the system

CALLS = ("write", "fsync", "rename", "mkdir", "unlinkat", "rmdir")
FAULTS = ("signal=KILL", "error=ENOSPC", "error=EIO", "error=EDQUOT", "error=EROFS")
# torch opens files of the system too and does not survive errors there; a kill is a kill.
CELLS = [("openat", "signal=KILL"), *((call, fault) for call in CALLS for fault in FAULTS)]


def attempt_under_strace(folder: Path, inject: str) -> tuple[int, bool]:
    """Go on with the run in a forked child that strace has taken hold of; gives its exit code and if it was hit."""
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ready, 1)
        code = 0
        try:
            run_tiny_training(folder / "run", keep=1)
        except Exception as error:
            code = 2 if isinstance(error, TruebatchError) else 70
        os._exit(code)
    log = folder / "strace.log"
    tracer = subprocess.Popen(
        [
            "strace",
            "-p",
            str(child),
            "-o",
            str(log),
            "-e",
            f"trace={inject.partition(':')[0]}",
            "-e",
            f"inject={inject}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "attached" in tracer.stderr.readline()
    os.write(go, b"x")
    _, status = os.waitpid(child, 0)
    tracer.wait(60)
    tracer.stderr.close()
    os.close(ready)
    os.close(go)
    text = log.read_text()
    return os.waitstatus_to_exitcode(status), "INJECTED" in text or "SIGKILL" in text


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("call", "fault"), CELLS)
def test_a_fault_of_any_call_to_the_system_is_survived(ground, tmp_path, call, fault, record_property):
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    import_module("torch._dynamo")  # the first optimiser step loads it; here, so that no child has to
    hits = 0
    for nth in range(1, 400):
        folder = tmp_path / str(nth)
        shutil.copytree(ground.folder / "go-on", folder)
        code, was_hit = attempt_under_strace(folder, f"{call}:{fault}:when={nth}")
        if not was_hit:
            break
        hits += 1
        assert code == -signal.SIGKILL if "KILL" in fault else code in (0, 2), (nth, code)
        assert load_newest(folder / "run" / "checkpoints") is not None, nth
        assert kill_drill._in_child(kill_drill._attempt, folder, 1, False, "") == 0, nth
        assert end_of(folder / "run") == ground.ends["go-on"], nth
        shutil.rmtree(folder)
    assert hits
    record_property("trials", hits)


def test_the_quiet_run_keeps_what_it_should(tmp_path):
    run_tiny_training(tmp_path / "run", keep=1)
    assert [entry.step for entry in list_checkpoints(tmp_path / "run" / "checkpoints")] == [4, STEPS]


def test_the_best_is_known_from_the_checkpoints_alone(tmp_path):
    """As after a kill between a checkpoint and the mark, for whoever reads the run before it goes on."""
    run_tiny_training(tmp_path / "run", keep=3)
    checkpoints = tmp_path / "run" / "checkpoints"
    right = (checkpoints / BEST).read_bytes()
    (checkpoints / BEST).write_text(json.dumps({"step": 3, "about": {"loss": 9.0}}))
    assert best_step(checkpoints) == 4
    (checkpoints / BEST).unlink()
    assert best_step(checkpoints) == 4
    run_tiny_training(tmp_path / "run", keep=3)
    assert (checkpoints / BEST).read_bytes() == right


# The command


def test_doctor_looks_at_the_machine_and_says_what_is_well(tmp_path, capsys):
    assert run(["doctor", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for word in ("torch", "numba", "accelerator", "one owner at a time", "GiB free"):
        assert word in out
    assert not list(tmp_path.iterdir())


def test_doctor_fails_where_runs_cannot_be_kept(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(["doctor", "--folder", str(tmp_path / "file")]) == 1
    assert "failed" in capsys.readouterr().out


def test_the_drill_of_the_command_shows_every_trial_and_ends_with_1_when_one_fails(tmp_path, capsys, monkeypatch):
    names = ["write.synced", "checkpoint.after_manifest"]
    monkeypatch.setattr(kill_drill, "FAILPOINTS", names)
    monkeypatch.setattr(oom_drill, "PLACES", ())
    assert run(["doctor", "--drill", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "8 of 8 trials recovered" in out  # two failpoints, killed and on a full disk, one or three kept
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(kill_drill, "_check_left", lambda folder, start: "planted")
    assert run(["doctor", "--drill", "--folder", str(tmp_path), "--keep", "2", "--json"]) == 1
    assert '"planted"' in capsys.readouterr().out
