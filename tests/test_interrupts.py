"""A signal ends every command with 75, from its first line to its last, with words and without a traceback."""

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
from truebatch.training.config import TrainConfig
from truebatch.training.run_dir.resume_checks import opened_run
from truebatch.training.run_dir.run_dir import write_status

WAITS = 600
"""Seconds; only ends hangs."""
AT_IMPORT = """
import os, signal, sys
def watch(event, given):
    if event == "import" and given[0] == os.environ["AT"]:
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
sys.addaudithook(watch)
"""
AT_END = """
import atexit, os, signal, threading
def send():
    os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
atexit.register(send)
threading._register_atexit(send)
"""
SMALL_GPT = (
    "embedded_statements=40", "embedded_dialogues=40", "embedding_dim=16", "hidden_dim=16", "heads=2",
    "train.max_steps=4", "train.samples_per_step=8", "train.batch_size=8", "train.layout=padded",
)  # fmt: skip
SETTINGS = tuple(part for one in SMALL_GPT for part in ("--set", one))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "truebatch", *arguments]


def around(folder: Path, site: str = "", **more: str) -> dict[str, str]:
    """The environment of a process whose Python runs `site` before its program; no launcher around it."""
    if site:
        (folder / "sitecustomize.py").write_text(site)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TRUEBATCH_LANG": "en", **more}


def run(folder: Path, *arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=WAITS, check=False, **options)


def run_code(folder: Path, code: str) -> subprocess.CompletedProcess:
    return run(folder, sys.executable, "-c", textwrap.dedent(code), env=around(folder))


@pytest.mark.parametrize(
    ("at", "name", "arguments"),
    [
        ("truebatch.cli.commands.verify", "SIGTERM", ("demo",)),
        ("typer", "SIGINT", ("plan", "nothing.jsonl")),
        ("truebatch.cli.commands.train", "SIGHUP", ("config", "show", "chinese_gpt")),
        ("torch", "SIGTERM", ("train", "chinese_gpt")),
        ("torch.nn", "SIGINT", ("evaluate", "run")),
        ("transformers", "SIGUSR1", ("score", "a.jsonl", "--model", "m", "--yesno", "--out", "o")),
    ],
)
def test_a_signal_in_the_middle_of_any_import_ends_with_75_and_words(tmp_path, at, name, arguments):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    done = run(tmp_path, *command(*arguments), env=around(tmp_path, AT_IMPORT, AT=at, SIGNAL=name))
    assert done.returncode == 75, done.stderr
    assert done.stderr == f"error: interrupted\n  seen: {name}\n  do:   run the same command again to go on\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_at_the_end_leaves_the_exit_code_as_it_is(tmp_path, name):
    site = around(tmp_path, AT_END, SIGNAL=name)
    assert run(tmp_path, *command("--version"), env=site).returncode == 0
    done = run(tmp_path, *command("plan", "nothing.jsonl"), env=site)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


WORK = """
import os, signal, sys, time
from truebatch.interrupts import catch_interruptions, finished, holding, interruptible
catch_interruptions()
def send(number):
    os.kill(os.getpid(), number)
"""


def test_work_gets_an_exception_so_that_it_can_close_what_is_open(tmp_path):
    done = run_code(
        tmp_path,
        WORK
        + """
try:
    with interruptible():
        send(signal.SIGTERM)
        time.sleep(600)
except KeyboardInterrupt as error:
    print("closed after", error)
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed after SIGTERM\n", "")


def test_an_interruption_of_code_in_a_string_leaves_the_exit_code_alone(tmp_path):
    done = run_code(
        tmp_path,
        WORK
        + """
try:
    with interruptible():
        exec("send(signal.SIGTERM); time.sleep(600)")
except KeyboardInterrupt:
    sys.exit(75)
""",
    )
    assert (done.returncode, done.stderr) == (75, "")


def test_an_interruption_in_a_destructor_is_not_lost_and_not_printed(tmp_path):
    done = run_code(
        tmp_path,
        WORK
        + """
class Held:
    def __del__(self):
        send(signal.SIGTERM)
        for _ in range(1000):
            pass
try:
    with interruptible():
        Held()
        time.sleep(600)
except KeyboardInterrupt as error:
    print("closed after", error)
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed after SIGTERM\n", "")


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        ("SIGINT", "SIGINT", True),
        ("SIGTERM", "SIGINT", True),
        ("SIGTERM", "SIGTERM", False),
        ("SIGTERM", "SIGHUP", False),
    ],
)
def test_who_asks_twice_is_not_kept_waiting_but_an_echo_is_no_second_request(tmp_path, first, second, ends):
    done = run_code(
        tmp_path,
        WORK
        + f"""
try:
    with interruptible():
        send(signal.{first})
        time.sleep(600)
finally:
    send(signal.{second})
    print("closed", flush=True)
    os._exit(3)
""",
    )
    assert (done.returncode, done.stdout) == ((75, "") if ends else (3, "closed\n"))
    assert "Traceback" not in done.stderr


def test_a_second_request_that_is_no_echo_stops_at_once(tmp_path):
    done = run_code(
        tmp_path,
        WORK
        + """
sys.modules["truebatch.interrupts"].ECHO_SECONDS = 0.0
try:
    with interruptible():
        send(signal.SIGTERM)
        time.sleep(600)
finally:
    send(signal.SIGTERM)
    print("closed", flush=True)
""",
    )
    assert (done.returncode, done.stdout) == (75, "")


def test_what_is_open_is_closed_even_in_the_middle_of_an_import(tmp_path):
    (tmp_path / "slow.py").write_text("import time\nsend = __import__('__main__').send\nsend(15)\ntime.sleep(600)\n")
    done = run_code(
        tmp_path,
        WORK
        + """
try:
    with interruptible(), holding():
        import slow
except KeyboardInterrupt as error:
    print("closed after", error)
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed after SIGTERM\n", "")


def test_a_fork_dies_of_the_signal_as_if_nobody_had_caught_it(tmp_path):
    done = run_code(
        tmp_path,
        WORK
        + """
child = os.fork()
if child == 0:
    with interruptible():
        send(signal.SIGTERM)
        time.sleep(600)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "-15\n", "")


def test_what_was_ignored_stays_ignored(tmp_path):
    code = "import signal, subprocess, sys\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does
    code += f"sys.exit(subprocess.run([sys.executable, '-c', {WORK + 'send(signal.SIGHUP)'!r}]).returncode)"
    assert run_code(tmp_path, code).returncode == 0


TARGET = """
import os, signal, time
import numpy as np
def samples():
    open("working", "w").close()
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_command_at_work_ends_with_75(tmp_path, name):
    (tmp_path / "slow.py").write_text(TARGET)
    process = subprocess.Popen(
        command("plan", "slow.py:samples"), cwd=tmp_path, env=around(tmp_path), stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: (tmp_path / "working").exists() or process.poll() is not None)
    process.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=WAITS)
    assert process.returncode == 75
    assert error == f"error: interrupted\n  seen: {name}\n  do:   run the same command again to go on\n"


def open_and_fail(folder: Path, error: BaseException, *, is_done: bool) -> None:
    with opened_run(folder, TrainConfig()) as run:
        if is_done:
            write_status(run, "done", step=7, exit_code=0)
        raise error


def test_a_run_that_is_interrupted_before_its_steps_or_after_them_says_so_in_its_status(tmp_path):
    for before in (None, "done"):
        with pytest.raises(KeyboardInterrupt):
            open_and_fail(tmp_path / str(before), KeyboardInterrupt("SIGTERM"), is_done=before is not None)
        status = json.loads((tmp_path / str(before) / "status.json").read_text())
        assert (status["state"], status["exit_code"], status["step"]) == ("interrupted", 75, 7 if before else 0)


def test_an_export_that_fails_makes_no_run_that_is_done_and_a_refused_start_changes_nothing(tmp_path):
    with pytest.raises(OSError, match="full"):
        open_and_fail(tmp_path, OSError(28, "full"), is_done=True)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    (tmp_path / "status.json").write_text(json.dumps({**status, "state": "done", "exit_code": 0, "pid": 1}))
    with pytest.raises(ConfigError):
        open_and_fail(tmp_path, ConfigError("no", seen="no", do="no"), is_done=False)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"


LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from truebatch.interrupts import catch_interruptions, interruptible
from truebatch.training.distributed import launcher as launching
catch_interruptions()
real = launching._start
def start(*given):
    child = real(*given)
    print(child.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return child
launching._start = start
code = "import time; time.sleep(600)"
with interruptible():
    sys.exit(launching.launch([], 3, folder=Path("."), program=(sys.executable, "-c", code)))
"""


def test_a_launcher_that_is_stopped_while_it_starts_processes_leaves_none_and_starts_no_more(tmp_path):
    done = run_code(tmp_path, LAUNCHER)
    assert done.returncode == 75
    assert done.stderr == "error: interrupted\n  seen: SIGTERM\n  do:   run the same command again to go on\n"
    (pid,) = done.stdout.split()
    assert not Path("/proc", pid).exists()


def wait_until(is_so) -> None:
    until = time.monotonic() + WAITS
    while not is_so() and time.monotonic() < until:
        time.sleep(0.002)
