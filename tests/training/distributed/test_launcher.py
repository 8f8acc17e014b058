"""Several processes as one command: the exit code that is true, nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from truebatch.errors import ConfigError
from truebatch.training.distributed import launcher
from truebatch.training.distributed.launcher import check_ranks, launch, ranks_around
from truebatch.training.run_dir.run_dir import RunFolder, write_status


def program(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(code))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((75, 75), 75), ((0, 75), 75), ((2, 70), 2), ((0, 2), 2), ((0, 1), 1), ((70, 0), 70)],
)
def test_the_first_process_that_fails_decides(tmp_path, codes, expected):
    code = f"time.sleep(0.3 * rank)\nsys.exit({codes}[rank])"
    assert launch([], 2, folder=tmp_path, program=program(code)) == expected


@pytest.mark.parametrize("after", ["sys.exit(70)", "time.sleep(600)"])
def test_a_rank_that_left_to_be_started_again_decides_whatever_becomes_of_the_others(
    tmp_path, capfd, monkeypatch, after
):
    """Memory that runs out on one rank of a sharded model: the others lose a neighbour, or wait for it for ever."""
    monkeypatch.setattr(launcher, "_GRACE_SECONDS", 1.0)
    write_status(RunFolder(tmp_path, {}), "failed", step=4, exit_code=70, message="connection closed by peer")
    code = f"if rank == 1:\n    print('error: memory ran out', file=sys.stderr)\n    sys.exit(75)\ntime.sleep(0.5); {after}"
    assert launch([], 2, folder=tmp_path, program=program(code)) == 75
    assert "memory ran out" in capfd.readouterr().err
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("interrupted", 75, 4)


def test_what_the_failing_rank_says_is_shown_and_the_others_are_ended(tmp_path, capfd):
    code = "if rank == 1:\n    print('error: no such thing', file=sys.stderr)\n    sys.exit(2)\ntime.sleep(600)"
    assert launch([], 3, folder=tmp_path, program=program(code)) == 2
    assert capfd.readouterr().err == "rank 1 failed first:\nerror: no such thing\n"


def test_what_all_ranks_say_is_said_once(tmp_path, capfd):
    code = "time.sleep(0.3 * (1 - rank)); print('error: not this way', file=sys.stderr); sys.exit(2)"
    assert launch([], 2, folder=tmp_path, program=program(code)) == 2
    assert capfd.readouterr().err == "error: not this way\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 75), (signal.SIGABRT, 70)])
def test_a_killed_process_is_named_and_the_status_says_how_the_run_ended(tmp_path, capfd, number, code):
    write_status(RunFolder(tmp_path, {}), "running", step=7)
    script = f"time.sleep(0.2)\nif rank == 1: os.kill(os.getpid(), {int(number)})\ntime.sleep(600)"
    assert launch([], 2, folder=tmp_path, program=program(script)) == code
    assert f"rank 1 was ended by {number.name}" in capfd.readouterr().err
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["exit_code"], status["step"]) == (code, 7)
    assert status["state"] == ("interrupted" if code == 75 else "failed")


def test_a_status_that_is_right_is_left_alone(tmp_path):
    write_status(RunFolder(tmp_path, {}), "failed", step=3, exit_code=2, message="the reason")
    assert launch([], 2, folder=tmp_path, program=program("time.sleep(0.2 * rank); sys.exit(2)")) == 2
    assert json.loads((tmp_path / "status.json").read_text())["message"] == "the reason"


PARENT = """
import sys
from pathlib import Path
from truebatch.training.distributed.launcher import launch
code = '''
import os, signal, sys, time
from truebatch.training.distributed.launcher import stop_with_parent
Path = __import__("pathlib").Path
here = Path(sys.argv[1])
def stop(number, frame):
    (here / f"stopped-{os.environ['RANK']}").write_text(str(number))
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
stop_with_parent()
(here / f"started-{os.environ['RANK']}").touch()
while True: time.sleep(0.05)
'''
sys.exit(launch([sys.argv[1]], 2, folder=Path(sys.argv[1]), program=(sys.executable, "-c", code)))
"""


def wait_for(place: Path, pattern: str, number: int) -> list[Path]:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        found = [path for path in place.glob(pattern) if pattern.startswith("started") or path.read_text()]
        if len(found) == number:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{pattern}: {list(place.iterdir())}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_command_its_processes_are_asked_to_stop(tmp_path, number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], start_new_session=True)
    wait_for(tmp_path, "started-*", 2)
    # To the whole group, as the terminal sends Ctrl-C; the processes of the run are not in it.
    os.killpg(parent.pid, number)
    stopped = wait_for(tmp_path, "stopped-*", 2)
    expected = number if number != signal.SIGKILL else signal.SIGTERM
    assert {path.read_text() for path in stopped} == {str(int(expected))}
    assert parent.wait(600) == (75 if number != signal.SIGKILL else -signal.SIGKILL)


def test_a_launcher_around_is_seen_and_another_number_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks_around() is None
    check_ranks(5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert ranks_around() == 2
    check_ranks(2)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2, devices=4"):
        check_ranks(4)
