"""Names of modules that exported models and scripts of users hold still lead to the code."""

from __future__ import annotations

import importlib

import pytest

FORMER = {
    "truebatch.systems.chinese_gpt.compat": "truebatch_systems.chinese_gpt.compat",
    "truebatch.systems.seqset_vae.compat": "truebatch_systems.seqset_vae.compat",
    "truebatch.systems.stitched_llm.compat": "truebatch_systems.stitched_llm.compat",
    "truebatch.systems.vl_reward.compat": "truebatch_systems.vl_reward.compat",
    "truebatch.systems.vlm_pruning.compat": "truebatch_systems.vlm_pruning.compat",
    "truebatch.systems.stitched_llm.model": "truebatch_systems.stitched_llm.model.model",
    "truebatch.systems.stitched_llm.configuration": "truebatch_systems.stitched_llm.model.hf_config",
}


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_is_the_same_module(former):
    module = importlib.import_module(former)
    assert module is importlib.import_module(FORMER[former])
    assert module.__spec__.name == FORMER[former]


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_kind"):
        importlib.import_module("truebatch.systems.nothing_of_this_kind")
