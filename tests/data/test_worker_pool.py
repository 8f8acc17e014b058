"""The watch over workers: no fault without the name of its sample, no process left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import pytest

from tests.data.texts import (
    BAD,
    FIELDS,
    Texts,
    assert_same,
    text_plan,
    two,
)
from truebatch.data import worker_pool
from truebatch.data.loader import LoaderConfig, load_steps
from truebatch.errors import LoaderError

PATIENCE = 2.5
"""Seconds until a worker counts as hung; a sample takes one that works a few milliseconds."""


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    assert not [p for p in active_children() if p.name.startswith("truebatch")]


@pytest.mark.parametrize(
    ("fault", "wrong", "seen"),
    [
        ("kill", "died while loading", "killed by SIGKILL"),
        ("segfault", "died while loading", "killed by SIGSEGV"),
        ("exit", "died while loading", "exit code 3"),
        ("leave", "died while loading", "exit code 4"),
        ("hang", "hangs while loading", f"timeout_seconds={PATIENCE}"),
        ("stop", "hangs while loading", f"timeout_seconds={PATIENCE}"),
    ],
)
def test_a_lost_worker_is_reported_with_the_sample_it_was_on(fault, wrong, seen):
    plan = text_plan()
    step = next(s for s in range(plan.num_steps) if BAD in plan.step_sample_ids(s))
    with pytest.raises(LoaderError, match=rf"worker \d {wrong} sample {BAD}\n") as caught:
        list(load_steps(plan, Texts(fault=fault), FIELDS, config=two(timeout_seconds=PATIENCE)))
    assert seen in caught.value.seen
    assert f"step {step}, micro-batch" in caught.value.seen
    assert caught.value.do


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sample_that_raises_is_named_at_its_own_step_with_its_traceback(workers):
    plan = text_plan()
    step = next(s for s in range(plan.num_steps) if BAD in plan.step_sample_ids(s))
    steps = load_steps(plan, Texts(fault="raise"), FIELDS, config=LoaderConfig(workers=workers))
    here = list(load_steps(plan, Texts(), FIELDS))
    assert_same([next(steps) for _ in range(step)], here[:step])
    with pytest.raises(LoaderError, match=f"sample {BAD} could not be loaded\n.*OSError: the disk said no") as caught:
        next(steps)
    assert "in misbehave" in caught.value.seen
    cause = caught.value.__cause__
    text = str(cause) if workers else repr(cause)
    assert "the disk said no" in text
    assert ("Traceback (most recent call last)" in text) == bool(workers)


def test_workers_that_die_or_hang_are_replaced_when_asked_and_the_order_stays(tmp_path, caplog):
    plan = text_plan("packed")
    here = list(load_steps(plan, Texts(), FIELDS))
    for fault in ("kill", "hang"):
        dataset = Texts(fault=fault, once=tmp_path / fault)
        config = two(restarts=1, timeout_seconds=PATIENCE)
        assert_same(list(load_steps(plan, dataset, FIELDS, config=config)), here)
        assert f"while loading sample {BAD}" in caplog.text
        caplog.clear()


def test_a_sample_that_ends_two_workers_is_named_however_many_restarts_are_left():
    with pytest.raises(LoaderError, match=f"sample {BAD} killed 2 workers"):
        list(load_steps(text_plan(), Texts(fault="exit"), FIELDS, config=two(restarts=50)))


def test_workers_killed_from_outside_again_and_again_change_nothing():
    plan = text_plan(samples_per_step=2)
    here = list(load_steps(plan, Texts(), FIELDS))
    there, kills = [], 0
    for step in load_steps(plan, Texts(), FIELDS, config=two(restarts=1000)):
        there.append(step)
        alive = active_children()  # the one that was killed before may not be replaced yet
        for process in alive[len(there) % len(alive) :][:1] if alive else ():
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
    assert kills > len(here) // 2
    assert_same(there, here)


def test_an_idle_worker_that_is_killed_is_reported_too():
    steps = load_steps(text_plan(), Texts(), FIELDS, config=two())
    next(steps)
    for process in active_children():
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(LoaderError, match="killed by SIGKILL"):
        list(steps)


def test_a_worker_that_cannot_start_in_time_is_reported(monkeypatch):
    monkeypatch.setattr(worker_pool, "START_SECONDS", 0.5)
    monkeypatch.setattr("truebatch.data.worker._settle_in", lambda: time.sleep(600))
    with pytest.raises(LoaderError, match="hangs while starting"):
        list(load_steps(text_plan(), Texts(), FIELDS, config=two(timeout_seconds=0.5, start_method="fork")))


def test_closing_dropping_or_failing_half_way_ends_the_workers():
    steps = load_steps(text_plan(), Texts(), FIELDS, config=two())
    next(steps)
    assert len(active_children()) == 2
    steps.close()
    assert not active_children()

    second = int(text_plan().step_sample_ids(1)[0])  # hangs while the first step is in use
    for _ in load_steps(text_plan(), Texts(fault="hang", bad=second), FIELDS, config=two()):
        break
    gc.collect()
    assert not active_children()

    with pytest.raises(KeyError, match="a fault in the loop"):
        fail_in_a_loop()
    gc.collect()
    assert not active_children()


def fail_in_a_loop() -> None:
    for _ in load_steps(text_plan(), Texts(), FIELDS, config=two()):
        raise KeyError("a fault in the loop")


def test_two_loaders_at_once_do_not_disturb_each_other():
    plan = text_plan()
    here = list(load_steps(plan, Texts(), FIELDS))
    first = load_steps(plan, Texts(), FIELDS, config=two())
    head = [next(first)]
    second = load_steps(plan, Texts(), FIELDS, config=two())
    next(second)
    second.close()
    assert_same(head + list(first), here)


PARENT = """
import sys, time
from multiprocessing import active_children
from tests.data.texts import FIELDS, Texts, text_plan, two
from truebatch.data.loader import load_steps
steps = load_steps(text_plan(), Texts(), FIELDS, config=two())
kept = next(steps)
print(*[p.pid for p in active_children()], flush=True)
{then}
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("then", "sent", "code"),
    [("time.sleep(600)", signal.SIGKILL, -9), ("time.sleep(600)", signal.SIGINT, -2), ("", 0, 0)],
    ids=["killed", "interrupted", "exits with the iterator open"],
)
def test_no_worker_outlives_the_main_process(then, sent, code):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    if sent == signal.SIGINT:
        os.killpg(parent.pid, sent)  # as a terminal does: to the workers too
    elif sent:
        parent.send_signal(sent)
    _, errors = parent.communicate(timeout=600)
    assert parent.returncode == code
    assert errors.count("Traceback") == (sent == signal.SIGINT)  # the parent's own, none of a worker
    until = time.monotonic() + 600
    while any(map(is_alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))


@pytest.mark.slow
@pytest.mark.parametrize("bad", range(0, 26, 5))
@pytest.mark.parametrize("fault", ["kill", "exit", "segfault", "raise", "hang"])
def test_every_fault_at_any_sample_is_named_and_can_be_survived(fault, bad, tmp_path):
    plan = text_plan("packed")
    with pytest.raises(LoaderError, match=f"sample {bad}\\b"):
        list(load_steps(plan, Texts(fault=fault, bad=bad), FIELDS, config=two(timeout_seconds=PATIENCE)))
    if fault != "raise":
        dataset = Texts(fault=fault, bad=bad, once=tmp_path / "seen")
        survived = list(load_steps(plan, dataset, FIELDS, config=two(timeout_seconds=PATIENCE, restarts=1)))
        assert_same(survived, list(load_steps(plan, Texts(), FIELDS)))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_that_reaches_all_processes_of_a_command_ends_no_worker(name):
    """`timeout`, a terminal and schedulers send it to every one; only the main process decides what it means."""
    steps = load_steps(text_plan(), Texts(), FIELDS, config=two())
    first = next(steps)
    workers = active_children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, getattr(signal, name))
    assert len([first, *steps]) == text_plan().num_steps
    assert not active_children()
