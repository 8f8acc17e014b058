"""DeepSpeed ZeRO-2 under a stitched model: the update of the adapter is the gradient one by one, donors stay as they are."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.systems.stitched_llm import zero_processes

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
def test_its_engine_moves_the_adapter_by_the_gradient_one_by_one(tmp_path):
    for rank in zero_processes.run_ranks(tmp_path):
        for layout in zero_processes.LAYOUTS:
            assert rank[layout]["engine"] == "DeepSpeedEngine"
            assert rank[layout]["donors_are_untouched"]
            assert zero_processes.error_of(rank[layout]) <= 1e-6
        assert rank["run"]["saved_is_trained"]
        assert rank["run"]["losses"][-1] < rank["run"]["losses"][0]


def test_the_kept_measurement_is_within_the_promise():
    kept = json.loads((Path(__file__).parents[3] / "docs/results/stitched_llm_deepspeed.json").read_text())
    assert [row["layout"] for row in kept["rows"]] == list(zero_processes.LAYOUTS)
    assert all(row["stage"] == 2 and row["relative_error"] <= 1e-6 for row in kept["rows"])
    assert kept["run"]["donors_are_untouched"]
    assert kept["run"]["saved_is_trained"]
