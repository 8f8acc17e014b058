"""The benchmarks of `exactness: bits`: what counts as a miss, and, slowly, the whole sweep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training import exactness, exactness_speed

ROOT = Path(__file__).parents[2]


def row(method, **more):
    return {"case": "tiny", "method": method, "steps": 4, "equal": 4, **more}


def missed(*rows):
    return exactness.find_problems({"rows": rows, "config": {"steps": 4, "errors": 2, "kills": 1}})


def test_a_step_that_differs_and_a_fault_that_never_came_are_misses():
    assert missed(row("2 processes"), row(exactness.KILLS, kills=1)) == []
    assert missed(row("2 processes", equal=3)) == ["tiny, 2 processes: 3 of 4 steps are equal, of 4"]
    assert missed(row("2 processes", steps=3, equal=3)) == ["tiny, 2 processes: 3 of 3 steps are equal, of 4"]
    assert "0 kills, not 1" in missed(row(exactness.KILLS, kills=0))[0]
    assert "1 errors were met, not 2" in missed(row(exactness.NO_MEMORY, **{"run again": 1}))[0]


def test_a_gpu_that_is_slow_or_differs_misses():
    bits = [
        {"case": "same bits, eager", "method": name, "digests": {"10": "a"}, "losses": ["0x1p+0"], "memory ran out": 1}
        for name in (exactness_speed.ONE, exactness_speed.NO_ROOM)
    ]
    speed = [
        {"case": "speed, eager", "method": name, "tokens_per_second": n}
        for name, n in (("rounding", 100), ("bits", 95))
    ]
    result = {**exactness_speed.summarize([*bits, *speed]), "rows": [*bits, *speed]}
    assert exactness_speed.find_problems(result) == ["not reached: 7 of 11 rows"]
    bits[1]["digests"], speed[1]["tokens_per_second"], bits[1]["memory ran out"] = {"10": "b"}, 80, 0
    result = {**exactness_speed.summarize([*bits, *speed]), "rows": [*bits, *speed]}
    found = exactness_speed.find_problems(result)
    assert "same bits, eager: different results: 2, not 1" in found
    assert "speed, eager: 0.80 of rounding, not 0.9" in found
    assert "same bits, eager: memory never ran out" in found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), [("tiny Qwen3", ("12", "6", "3")), ("", ("100", "50", "20"))])
def test_no_cut_changes_a_bit(case, size, tmp_path):
    steps, errors, kills = size
    command = [
        sys.executable, "-m", "benchmarks", "exactness", "--only", case, "--steps", steps, "--errors", errors, "--kills",
        kills, "--json", str(tmp_path / "rows.json"),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 9 * (1 if case else 4)
    assert all(row["equal"] == row["steps"] == int(steps) for row in rows)
