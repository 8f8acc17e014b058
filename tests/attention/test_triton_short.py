"""The kernels for short samples give what attention written out gives, and nothing passes between samples.

Without a GPU Triton interprets them, cell by cell as on a GPU: slow, and exact enough to compare with fp64.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture(scope="module")
def found():
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.attention.triton_kernels"],
        env=os.environ | interpreted, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    "case", ["one tile", "samples across tiles", "both directions", "narrow heads", "one sample of one cell"]
)
def test_output_statistics_and_gradients_are_those_of_attention_written_out(found, case):
    limit = 1e-2 if found["device"] == "cuda" else 2e-6
    assert max(found[case]) < limit, found[case]


def test_what_a_sample_holds_reaches_no_other(found):
    assert found["stays inside"] == [True, True]
