"""DeepSpeed ZeRO-2 under a stitched model: the update of the adapter is the gradient one by one, donors stay as they are."""

import importlib.util

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
