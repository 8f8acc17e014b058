"""A stuck process is reported with its stacks and exits so that it can go on; a moving one is left alone."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from truebatch.errors import RunError
from truebatch.training.run_dir.watchdog import watch_progress


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=600, check=False
    )


def test_a_stuck_process_shows_all_stacks_and_exits_with_75():
    done = run("""
        import threading, time
        from truebatch.training.run_dir.watchdog import watch_progress
        def loading_forever():
            time.sleep(3600)
        def training_forever():
            loading_forever()
        threading.Thread(target=loading_forever, daemon=True).start()
        with watch_progress(0.5, who="rank 1 of 2", on_stuck=lambda report: print("told:", report)) as dog:
            dog.beat("the forward pass of step 7")
            training_forever()
    """)
    assert done.returncode == 75
    assert "rank 1 of 2 is stuck" in done.stderr
    assert "the forward pass of step 7" in done.stderr
    assert "training_forever" in done.stderr
    assert done.stderr.count("in loading_forever") == 2


def test_even_when_telling_others_fails_it_ends():
    done = run("""
        import time
        from truebatch.training.run_dir.watchdog import watch_progress
        with watch_progress(0.2, on_stuck=lambda report: 1 / 0):
            time.sleep(3600)
    """)
    assert done.returncode == 75
    assert "ZeroDivisionError" in done.stderr


def test_code_that_holds_the_interpreter_is_ended_too():
    done = run("""
        import ctypes
        from truebatch.training.run_dir import watchdog
        watchdog._GRACE_SECONDS = watchdog._REARM_SECONDS = 0.1
        with watchdog.watch_progress(0.3):
            ctypes.PyDLL(None).sleep(3600)
    """)
    assert done.returncode == 1
    assert "watch_progress" in done.stderr or "most recent call first" in done.stderr


def test_a_moving_process_is_left_alone():
    with watch_progress(5.0) as dog:
        for _ in range(20):
            time.sleep(0.005)
            dog.beat()


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_watchdog_without_time_is_refused(seconds):
    with pytest.raises(RunError, match="timeout_seconds"), watch_progress(seconds):
        pass


def test_a_run_goes_on_where_no_thread_can_watch_it(monkeypatch, caplog):
    def refuse(*_args, **_more):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with watch_progress(30.0) as dog:
        monkeypatch.setattr(dog, "_armed_at", 0.0)
        dog.beat("working")
    assert [record.message for record in caplog.records] == [
        "no thread can be started to detect a stuck run (can't start new thread); the run continues"
    ]
