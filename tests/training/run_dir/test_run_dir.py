"""A run folder has one owner, one configuration, and a status that tells the truth."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import RunError
from truebatch.testing.failpoints import ERRORS, armed, recorded
from truebatch.training.run_dir import run_dir
from truebatch.training.run_dir.run_dir import (
    config_changes,
    config_fingerprint,
    open_run,
    plain_config,
    read_status,
    write_status,
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    width: int = 8
    names: tuple[str, ...] = ("甲", "b")


@dataclass(frozen=True)
class Config:
    learning_rate: float = 1e-4
    model: Model = field(default_factory=Model)
    note: str | None = None


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "跑 步" / "run"


def test_a_run_is_made_and_gone_on_with(folder):
    with open_run(folder, Config()) as run:
        assert run.plan.is_dir()
        assert run.previous is None
        first = run.fingerprint
    with open_run(folder, Config()) as run:
        assert run.fingerprint == first
    assert (folder / "config.yaml").read_text().startswith("learning_rate: 0.0001\n")


def test_a_changed_field_is_refused_by_its_name_with_both_values(folder):
    with open_run(folder, Config()):
        pass
    changed = Config(model=Model(width=16))
    words = r"model\.width is changed(?s:.*)model\.width: 8 before, 16 now"
    with pytest.raises(RunError, match=words), open_run(folder, changed):
        pass
    with pytest.raises(RunError, match="and 1 more"), open_run(folder, Config(2e-4, Model(9))):
        pass


def test_a_field_that_may_change_is_written_anew(folder):
    with open_run(folder, Config()):
        pass
    with open_run(folder, Config(note="x"), may_change=("note",)):
        pass
    with open_run(folder, Config(note="x")):
        pass


def test_a_fresh_start_moves_the_earlier_run_aside_and_deletes_nothing(folder):
    with open_run(folder, Config()) as run:
        run.metrics.write_text("kept")
    for number in (1, 2):
        with open_run(folder, Config(note=str(number)), fresh=True) as run:
            assert run.previous.name == f"run.previous-{number}"
            assert not run.metrics.exists()
    assert (folder.parent / "run.previous-1" / "metrics.jsonl").read_text() == "kept"


def test_a_fresh_start_in_a_new_folder_is_just_a_start(folder):
    with open_run(folder, Config(), fresh=True) as run:
        assert run.previous is None


def test_checkpoints_without_a_configuration_are_not_touched(folder):
    (folder / "checkpoints" / "step-3").mkdir(parents=True)
    with pytest.raises(RunError, match=r"no config\.yaml"), open_run(folder, Config()):
        pass
    assert (folder / "checkpoints" / "step-3").is_dir()


plain = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=5))
configs = st.dictionaries(
    st.text("abc", min_size=1, max_size=2), st.one_of(plain, st.lists(plain, max_size=2)), max_size=4
)


@settings(deadline=None, max_examples=60)
@given(old=configs, new=configs)
def test_two_configurations_have_one_fingerprint_exactly_when_they_have_no_changes(old, new):
    old, new = plain_config(old), plain_config(new)
    assert (config_fingerprint(old) == config_fingerprint(new)) == (not config_changes(old, new))
    assert not config_changes(old, plain_config(old))
    assert set(config_changes(old, new)) == {k for k in {*old, *new} if repr(old.get(k)) != repr(new.get(k))}


# One owner


def try_to_own(folder: Path, barrier, seconds: float, answers) -> None:
    barrier.wait()
    try:
        with open_run(folder, {"a": 1}):
            answers.put(("owner", os.getpid()))
            time.sleep(seconds)
    except RunError as error:
        answers.put(("refused", error.seen))


def test_twenty_starts_at_once_have_exactly_one_owner(folder):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(20), context.Queue()
    processes = [context.Process(target=try_to_own, args=(folder, barrier, 3600.0, answers)) for _ in range(20)]
    for process in processes:
        process.start()
    told = [answers.get(timeout=600) for _ in range(20)]
    for process in processes:
        process.kill()
        process.join(600)
    assert [kind for kind, _ in told].count("owner") == 1
    assert all("process " in seen for kind, seen in told if kind == "refused")
    # Its lock went with it.
    with open_run(folder, {"a": 1}):
        pass


def test_the_owner_is_named_to_the_second_process(folder):
    with (
        open_run(folder, {"a": 1}),
        pytest.raises(RunError, match=rf"process {os.getpid()} on "),
        open_run(folder, {"a": 1}),
    ):
        pass


def own_until_killed(folder: Path, ready) -> None:
    with open_run(folder, {"a": 1}):
        ready.set()
        time.sleep(3600)


def hold_lock(folder: Path, ready, seconds: float) -> None:
    with (folder / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ready.set()
        time.sleep(seconds)


def test_a_killed_owner_whose_workers_live_a_moment_longer_is_waited_for(folder):
    # A worker forked by the owner shares its lock; older versions of filelock leave it that way.
    context = multiprocessing.get_context("fork")
    owned, held = context.Event(), context.Event()
    owner = context.Process(target=own_until_killed, args=(folder, owned))
    owner.start()
    assert owned.wait(600)
    owner.kill()
    owner.join()
    worker = context.Process(target=hold_lock, args=(folder, held, 1.0))
    worker.start()
    assert held.wait(600)
    with open_run(folder, {"a": 1}):
        pass
    worker.join()


def test_the_owner_is_free_again_after_an_error_at_any_place(tmp_path):
    with recorded() as visits, open_run(tmp_path / "quiet", {"a": 1}):
        pass
    for number, name in enumerate(visits):
        spec = f"{name}:{list(ERRORS)[number % len(ERRORS)]}:1"
        with armed(spec), pytest.raises(RunError), open_run(tmp_path / str(number), {"a": 1}):
            pass
        with open_run(tmp_path / str(number), {"a": 1}):
            pass


def test_the_owner_is_free_again_while_an_error_of_memory_is_still_looked_at(tmp_path):
    with recorded() as visits, open_run(tmp_path / "quiet", {"a": 1}):
        pass
    for number, name in enumerate(visits):
        opening = open_run(tmp_path / str(number), {"a": 1})
        with armed(f"{name}:oom:1"), pytest.raises((MemoryError, torch.OutOfMemoryError)) as caught:
            opening.__enter__()
        with open_run(tmp_path / str(number), {"a": 1}):
            assert caught.tb is not None  # and with it every frame of the start that failed


# Status


def test_the_status_says_what_happened(folder):
    assert read_status(folder)["state"] == "new"
    with open_run(folder, {"a": 1}) as run:
        write_status(run, "running", step=3)
        assert read_status(folder)["state"] == "running"
        write_status(run, "interrupted", step=4, exit_code=75, message="asked to stop by SIGTERM")
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("interrupted", 75, 4)
    assert status["pid"] == os.getpid()
    with open_run(folder, {"a": 1}) as run, pytest.raises(RunError, match="'finished'"):
        write_status(run, "finished", step=4)


def test_a_killed_process_is_not_called_running(folder):
    with open_run(folder, {"a": 1}) as run:
        child = os.fork()
        if child == 0:
            write_status(run, "running", step=2)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        status = read_status(folder)
    assert status["state"] == "interrupted"
    assert str(child) in status["message"]


def test_a_process_on_another_host_is_believed(folder, monkeypatch):
    with open_run(folder, {"a": 1}) as run:
        monkeypatch.setattr(run_dir.socket, "gethostname", lambda: "elsewhere")
        write_status(run, "running", step=2)
        monkeypatch.undo()
        assert read_status(folder)["state"] == "running"
