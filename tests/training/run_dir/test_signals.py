"""Being asked to stop sets a flag; a second Ctrl-C stops immediately; handlers come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from truebatch.training.run_dir.signals import EXIT_INTERRUPTED, catch_signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_sets_the_flag_and_nothing_else(name):
    before = signal.getsignal(getattr(signal, name))
    with catch_signals() as flag:
        assert flag.requested is None
        os.kill(os.getpid(), getattr(signal, name))
        assert flag.requested.signal_name == name
        assert flag.requested.exit_code == EXIT_INTERRUPTED == 75
    assert signal.getsignal(getattr(signal, name)) is before


def test_a_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with catch_signals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_only_ctrl_c_counts_as_the_second_one():
    with catch_signals() as flag:
        for name in ("SIGTERM", "SIGTERM", "SIGINT", "SIGUSR1"):
            os.kill(os.getpid(), getattr(signal, name))
            assert str(flag.requested) == "asked to stop by SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_one_ctrl_c_that_a_launcher_hands_on_again_is_one(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with catch_signals() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.requested.signal_name == "SIGINT"


def test_the_first_asker_is_remembered():
    with catch_signals() as flag:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.requested.signal_name == "SIGUSR1"


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with catch_signals() as flag:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert flag.requested is None
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_outside_the_main_thread_it_says_so_and_the_flag_still_works():
    seen = []

    def work() -> None:
        with catch_signals() as flag:
            flag.request("a friend")
            seen.append((flag.note, flag.requested.signal_name))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((note, name),) = seen
    assert "main thread" in note
    assert name == "a friend"
    with catch_signals() as flag:
        assert flag.note == ""
