"""Tests that need torchao or DeepSpeed, with the package there: `make real` puts each in a folder of its own."""

import os
import subprocess
import sys

import pytest

from tests.real.weights import FOLDER

CASES = [
    ("site", "torchao", "tests/systems/stitched_llm/test_training.py", "every_way and int8"),
    ("deepspeed", "deepspeed", "tests/systems/stitched_llm/test_deepspeed.py", "engine"),
]
"""The folder of a package, its name, and the test that is skipped without it."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("folder", "package", "tests", "named"), CASES, ids=[case[1] for case in CASES])
def test_what_needs_a_package_runs_with_it(folder, package, tests, named):
    site = FOLDER / folder
    if not (site / package).is_dir():
        pytest.skip(f"no {package} in {FOLDER.name}/{folder}: run `make real` first")
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-o",
        "addopts=",
        "-m",
        "slow or not slow",
        tests,
        "-k",
        named,
    ]
    done = subprocess.run(
        command, cwd=FOLDER.parent, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert "1 passed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
