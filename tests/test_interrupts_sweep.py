"""SIGTERM, Ctrl-C and SIGHUP at many moments of every command: 75 or the command's own end, never a traceback or an orphan.

The moments are counted from the first line of the program on (Linux says which signals a process catches): what comes while
Python itself starts is not ours to answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.test_interrupts import SETTINGS, command

WAITS = 600
SHARES = (0.0, 0.05, 0.25, 0.5, 0.8, 1.0)
"""Of the time that the command takes when it is left alone."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
COMMANDS = {
    "demo": (0, "demo"),
    "plan": (0, "plan", "texts.jsonl", "--compare"),
    "train": (0, "train", "chinese_gpt", "--out", "OUT", *SETTINGS),
    "train with workers": (0, "train", "chinese_gpt", "--out", "OUT", *SETTINGS, "--set", "train.workers=2"),
    "train on two devices": (0, "train", "chinese_gpt", "--out", "OUT", *SETTINGS, "--devices", "2"),
    "fit": (0, "fit", "chinese_gpt", "--out", "OUT", *SETTINGS),
    "verify": (0, "verify", "run"),
    "evaluate": (0, "evaluate", "run"),
    "generate": (0, "generate", "run", "--prompt", "你好"),
    "show": (2, "show", "run"),
    "report": (0, "report", "run"),
    "score": (0, "score", "asked.jsonl", "--yesno", "--model", "scripted", "--out", "OUT"),
    "score with workers": (
        0,
        "score",
        "asked.jsonl",
        "--yesno",
        "--model",
        "scripted",
        "--out",
        "OUT",
        "--workers",
        "2",
    ),
    "vl_reward": (0, "vl_reward", "run", "--set", "evaluation.output_dir=OUT", "--set", "benchmark.samples=8"),
    "doctor": (0, "doctor"),
    "config": (0, "config", "show", "chinese_gpt"),
    "init": (0, "init", "chinese_gpt", "--out", "OUT"),
    "env": (0, "env"),
    "census": (0, "census", "--help"),
}


@dataclass(frozen=True)
class End:
    code: int
    error: str
    seconds: float


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("interruption")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": "ab" * (i % 50 + 1)}) + "\n" for i in range(300)))
    asked = [{"id": str(i), "prompt": f"score={i % 7}"} for i in range(40)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    trained = command("train", "chinese_gpt", "--out", "run", *SETTINGS)
    subprocess.run(trained, cwd=folder, env=surroundings(), check=True, capture_output=True, timeout=WAITS)
    return folder


def surroundings() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "TRUEBATCH_LANG": "en"}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_signal_at_any_moment_ends_a_command_with_75_or_as_it_would_have_ended(place, name, record_property):
    expected, *arguments = COMMANDS[name]
    whole = end_of(place, [one.replace("OUT", f"{name.replace(' ', '-')}-whole") for one in arguments], None, 0.0)
    assert whole.code == expected, whole.error
    trials = [(share, SIGNALS[number % len(SIGNALS)]) for number, share in enumerate(SHARES)]
    wrong = []
    for number, (share, kind) in enumerate(trials):
        out = f"{name.replace(' ', '-')}-{number}"
        given = [one.replace("OUT", out) for one in arguments]
        ended = end_of(place, given, kind, share * whole.seconds)
        problems = problems_of(ended, expected, place / out)
        wrong += [(share, kind, problem, ended.error[-300:]) for problem in problems]
    record_property("trials", len(trials))
    assert not wrong, "\n".join(map(str, wrong))


def problems_of(ended: End, expected: int, out: Path) -> list[str]:
    found = [] if ended.code in (75, expected) else [f"exit code {ended.code}"]
    found += [word for word in ("Traceback", "Exception ignored") if word in ended.error]
    status = json.loads((out / "status.json").read_text()) if (out / "status.json").exists() else None
    if ended.code == 75 and status is not None and (status["state"], status["exit_code"]) != ("interrupted", 75):
        found.append(f"status {status}")
    return found


def end_of(place: Path, arguments: list[str], kind: str | None, seconds: float) -> End:
    """How a command ends that gets a signal so long after its first line; none of its processes is left behind."""
    with (place / "said").open("w+") as said:
        process = subprocess.Popen(
            command(*arguments), cwd=place, env=surroundings(), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
        )  # fmt: skip
        while not catches(process.pid) and process.poll() is None:
            time.sleep(0.001)
        began = time.monotonic()
        if kind is not None:
            watched = follow(process, seconds)
            process.send_signal(getattr(signal, kind))
        process.wait(WAITS)
        taken = time.monotonic() - began
        if kind is not None:
            _, alive = psutil.wait_procs([one for one in watched if one.is_running()], timeout=60)
            left = [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
            assert not left, left
        said.seek(0)
        return End(process.returncode, said.read(), taken)


def follow(process: subprocess.Popen, seconds: float) -> list[psutil.Process]:
    """Wait; the processes it has started by then."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return psutil.Process(process.pid).children(recursive=True)
    return []


def catches(pid: int) -> bool:
    """Whether a process catches SIGTERM by now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return bool(caught >> (signal.SIGTERM - 1) & 1)
