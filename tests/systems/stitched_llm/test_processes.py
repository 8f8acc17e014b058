"""Two processes share a step and give what one gives; the embedded donors are there before either needs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.systems.stitched_llm.test_commands import SETTINGS
from truebatch.cli.app import run
from truebatch_systems.stitched_llm.model.save_load import load_stitched

pytestmark = pytest.mark.xdist_group("stitched_donors")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_the_adapter_that_one_trains(cached, tmp_path):
    given = ["train", "stitched_llm", *SETTINGS, "--set", "train.samples_per_step=24", "--set", "train.max_steps=3"]
    given += ["--set", "train.layout=packed", "--log-format", "plain"]
    assert run([*given, "--out", str(tmp_path / "one")]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "truebatch", *given, "--devices", "2", "--out", str(tmp_path / "two")],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (load_stitched(tmp_path / name / "model").adapter.linear.weight.detach() for name in ("one", "two"))
    assert float((one - two).abs().max()) <= 1e-5 * float(one.abs().max())
    assert not torch.equal(one, torch.zeros_like(one))


@pytest.mark.slow
def test_two_processes_train_the_donors_that_are_not_there(tmp_path):
    given = [
        "train",
        "stitched_llm",
        "--set",
        "made_up_samples=64",
        "--set",
        "donor_steps=4",
        "--set",
        "train.max_steps=2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "truebatch", *given, "--devices", "2", "--out", str(tmp_path / "two")],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600,
        env={**os.environ, "TRUEBATCH_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"bottom", "top"} <= {path.name for path in (tmp_path / "cache").glob("*/*")}
    assert (tmp_path / "two" / "model").is_dir()
