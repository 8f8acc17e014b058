"""lm-evaluation-harness with `--model truebatch`: the same bits at any batch size, near those of `--model hf`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".real" / "lm_eval"
"""Where `make real` puts lm-eval, beside the environment."""


def run_program(folder, *path):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *map(str, path), os.environ.get("PYTHONPATH", "")]),
    }
    program = [sys.executable, str(Path(__file__).with_name("lm_eval_program.py")), str(folder)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])


def check_runs(runs):
    wanted = runs["auto"]
    assert runs["1"] == wanted
    assert runs["8"] == wanted
    for name, rows in runs["few"]["samples"].items():
        assert rows == wanted["samples"][name][:3]
    for name in ("tiny_answers",):
        assert wanted["samples"][name] == runs["hf"]["samples"][name]
    for name in ("tiny_choice", "tiny_rolling"):
        ours, theirs = (list(flat(one["samples"][name])) for one in (wanted, runs["hf"]))
        assert len(ours) == len(theirs) > 0
        assert all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4) for a, b in zip(ours, theirs, strict=True))


def flat(value):
    if isinstance(value, list):
        for one in value:
            yield from flat(one)
    else:
        yield float({"True": 1, "False": 0}.get(str(value), value))


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'truebatch[lm-eval]'"
)
def test_a_batch_size_changes_no_bit_of_any_score(tmp_path):
    check_runs(run_program(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs lm-eval beside the environment: make real")
def test_a_batch_size_changes_no_bit_of_any_score_in_lm_eval_beside_the_environment(tmp_path):
    check_runs(run_program(tmp_path, PACKAGES))
