"""A process of a run is killed: the others say that it is gone, not that something is wrong with truebatch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from truebatch.training.run_dir.run_dir import read_status

ROOT = Path(__file__).parents[3]


def rank_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("RANK", "")
    except psutil.Error:
        return ""


def wait_for_step(folder: Path, parent: subprocess.Popen) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and parent.poll() is None:
        log = folder / "metrics.jsonl"
        if log.exists() and log.read_text().count("\n") >= 2:
            return
        time.sleep(0.05)
    raise AssertionError("the run did not begin")


def test_a_killed_rank_is_named_and_nothing_is_called_a_fault_of_ours(tmp_path):
    command = [
        sys.executable, "-m", "truebatch", "train", "tests/tasks.py:system", "--out", str(tmp_path / "run"), "--devices", "2",
        "--set", "sleep_seconds=0.05", "--set", "train.epochs=200", "--set", "train.samples_per_step=4",
    ]  # fmt: skip
    parent = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        wait_for_step(tmp_path / "run", parent)
        children = psutil.Process(parent.pid).children()
        next(child for child in children if rank_of(child) == "1").send_signal(signal.SIGKILL)
        _, said = parent.communicate(timeout=600)
    finally:
        if parent.poll() is None:
            parent.terminate()
            parent.wait(600)
    text = said.decode()
    assert parent.returncode == 75, text
    assert "fault of truebatch" not in text
    assert "rank 1 was ended by SIGKILL" in text
    status = read_status(tmp_path / "run")
    assert (status["state"], status["exit_code"]) == ("interrupted", 75)
