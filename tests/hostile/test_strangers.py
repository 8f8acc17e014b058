"""Every hostile file and folder through the real command, in a process of its own whose memory and time are bounded.

No code of theirs runs, no command takes longer than 30 s or a gigabyte, none ends in a traceback, and each exit code is ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hostile.data_files import DATA
from tests.hostile.forkserver import MOST_SECONDS
from tests.hostile.making import CANARY, Hostile
from tests.hostile.model_folders import MODELS
from tests.hostile.run_folders import RUNS
from tests.hostile.settings_files import SETTINGS
from tests.hostile.strangers import STRANGERS
from tests.hostile.system_files import SYSTEMS

ROOT = Path(__file__).parents[2]
MOST_BYTES = 1 << 30
CASES = [*STRANGERS, *MODELS, *RUNS, *SYSTEMS, *SETTINGS, *DATA]
GROUPS = {
    "strangers": STRANGERS,
    "models": MODELS,
    "runs": RUNS,
    "systems": SYSTEMS,
    "settings": SETTINGS,
    "data": DATA,
}
WAYS = ("code", "traceback", "seconds", "memory", "exit")


@dataclass(frozen=True)
class Met:
    """What a command came to."""

    exit_code: int
    seconds: float
    max_bytes: int
    said: str
    ran_code: bool

    def faults(self, case: Hostile) -> list[str]:
        """What it should not have come to."""
        found = {
            "code": self.ran_code,
            "traceback": "Traceback" in self.said,
            "seconds": self.seconds > MOST_SECONDS,
            "memory": self.max_bytes > MOST_BYTES,
            "exit": self.exit_code != case.code or case.says not in self.said,
        }
        return [way for way, is_so in found.items() if is_so]


class Commands:
    """The forked commands; as a context manager."""

    def __enter__(self) -> Commands:
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "TRUEBATCH_LANG": "en",
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200",
        }  # fmt: skip
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.forkserver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=ROOT,
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()

    def meet(self, case: Hostile, folder: Path) -> Met | None:
        """Run the command of a case as a user would; None for the readers that are no command."""
        line = case.make(folder)
        if callable(line) or any("\0" in word for word in line):  # no shell can hand that over
            return None
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps({"line": list(line), "folder": str(folder)}) + "\n")
        self.server.stdin.flush()
        found = json.loads(self.server.stdout.readline())
        said = (folder / ".said").read_bytes()[-100_000:].decode("utf-8", "replace")
        return Met(**found, said=said, ran_code=(folder / CANARY).exists())


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("group", GROUPS)
def test_no_file_of_a_stranger_runs_code_hangs_or_takes_the_memory(group, tmp_path, record_property):
    bad, num, seconds, most = {}, 0, 0.0, 0
    with Commands() as commands:
        for number, case in enumerate(GROUPS[group]):
            folder = tmp_path / str(number)
            folder.mkdir()
            met = commands.meet(case, folder)
            if met is None:
                continue
            num, seconds, most = num + 1, max(seconds, met.seconds), max(most, met.max_bytes)
            if found := met.faults(case):
                bad[case.name] = (found, met.exit_code, round(met.seconds, 1), met.max_bytes >> 20, met.said[-600:])
    record_property("trials", num)
    record_property("longest seconds", f"{seconds:.1f}")
    record_property("most MiB", most >> 20)
    assert not bad, json.dumps(bad, indent=1)
    assert num >= (120 if group == "strangers" else 10)


def test_names_are_told_apart():
    assert len({case.name for case in CASES}) == len(CASES) >= 120


def test_an_endless_command_would_be_seen():
    case = Hostile("x", lambda folder: [], "words", 2)
    assert Met(2, 1.0, 1, "words", ran_code=False).faults(case) == []
    wrong = Met(1, 31.0, 2 << 30, "Traceback", ran_code=True)
    assert wrong.faults(case) == list(WAYS)
