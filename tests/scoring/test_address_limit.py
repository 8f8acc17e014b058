"""`truebatch score` under a limit of addresses: words and an exit code, no lost row, no half row, and the same export."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = 3_000
LIMITS_MIB = (500, 600, 700, 800, 900, 1000, 1100, 1300, 1600, 2000, 3000)
SPOKEN = (0, 2)
"""Exit codes of a run that Python could end itself: done, or out of memory."""


def score(folder: Path, limit: int | None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))

    command = [sys.executable, "-m", "truebatch", "score", "in.jsonl", "--model", "scripted", "--yesno", "--out", "run"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, preexec_fn=limited, timeout=1800)


def export(folder: Path) -> bytes:
    command = [sys.executable, "-m", "truebatch", "run", "export", "run", "--to", "rows.jsonl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return (folder / "rows.jsonl").read_bytes()


def fill(folder: Path) -> Path:
    folder.mkdir()
    lines = (json.dumps({"id": f"s{i}", "prompt": f"is {i} even? " + "x" * (i % 97)}) for i in range(SAMPLES))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = fill(tmp_path_factory.mktemp("quiet") / "one")
    assert score(folder, None).returncode == 0
    return export(folder)


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS_MIB)
def test_a_limit_of_addresses_loses_no_row_and_ends_in_words(limit: int, expected: bytes, tmp_path: Path):
    folder = fill(tmp_path / "one")
    broken = score(folder, limit)
    assert "Traceback" not in broken.stderr
    if broken.returncode in SPOKEN:
        assert broken.returncode == 0 or "error:" in broken.stderr
    else:  # a library that ends the process itself, before Python can speak: nothing has been scored yet
        assert not (folder / "run" / "journal").exists(), (broken.returncode, broken.stderr[-400:])
    assert score(folder, None).returncode == 0
    assert export(folder) == expected
