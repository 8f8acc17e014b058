"""A task that hangs or dies is a result of its own, and the others go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from truebatch.verification.census.processes import Workers, run_each


def answer(task):
    """What the workers of these tests do: a number is doubled, a word is a way to misbehave."""
    if task == "sleep":
        time.sleep(600)
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "print":
        os.write(1, b"noise of a library")
        os.write(2, b"noise of a library")
    return task * 2, os.getpid()


def run(tasks, **how):
    return {ended.task: ended for ended in run_each(tasks, answer, Workers(**how))}


@pytest.mark.parametrize("one_task_each", [True, False])
def test_every_task_ends_once_with_its_own_result(one_task_each):
    ended = list(run_each(range(7), answer, Workers(jobs=3, one_task_each=one_task_each)))
    assert sorted(e.task for e in ended) == list(range(7))
    assert all(e.result[0] == 2 * e.task and not e.problem for e in ended)
    processes = {e.result[1] for e in ended}
    assert os.getpid() not in processes
    assert len(processes) == 7 if one_task_each else len(processes) <= 3


@pytest.mark.parametrize("one_task_each", [True, False])
def test_a_task_that_hangs_is_killed_and_the_others_go_on(one_task_each):
    ended = run([1, "sleep", 2, 3], jobs=1, time_limit_s=1.0, one_task_each=one_task_each)
    assert ended["sleep"].problem.startswith("killed after")
    assert ended["sleep"].result is None
    assert {task: e.result[0] for task, e in ended.items() if task != "sleep"} == {1: 2, 2: 4, 3: 6}


@pytest.mark.parametrize("one_task_each", [True, False])
def test_a_process_that_dies_is_replaced(one_task_each):
    ended = run(["die", 5, 6], jobs=1, one_task_each=one_task_each)
    assert ended["die"].problem == f"died with exit code -{signal.SIGKILL.value}"
    assert ended[5].result[0] == 10
    assert ended[6].result[0] == 12


def test_what_workers_print_goes_nowhere(capfd):
    assert run(["print"])["print"].result[0] == "printprint"
    assert capfd.readouterr() == ("", "")


def test_workers_still_busy_are_killed_when_nobody_listens_any_more():
    running = run_each([1, "sleep"], answer, Workers(jobs=2))
    assert next(running).task == 1
    running.close()
    assert not multiprocessing.active_children()


def test_no_tasks_start_no_process():
    assert list(run_each([], answer, Workers())) == []
