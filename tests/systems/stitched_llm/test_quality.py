"""Trained to a quality: the embedded example as a newcomer gets it, slow."""

import pytest

from truebatch.systems.stitched_llm.building import open_donors
from truebatch.systems.stitched_llm.data import load, load_test
from truebatch.systems.stitched_llm.evaluating import compare_donors
from truebatch.systems.stitched_llm.saving import load_stitched
from truebatch.systems.stitched_llm.settings import StitchTrain
from truebatch.systems.stitched_llm.system import STITCHED_LLM
from truebatch.training.starting import Start, settings_type, train_system


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_five_hundred_steps_of_the_adapter_come_near_the_donors(tmp_path, tmp_path_factory, monkeypatch, stored):
    if stored == "int8":
        pytest.importorskip("torchao")
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path_factory.getbasetemp() / "quality"))
    config = settings_type(STITCHED_LLM)(stored=stored, train=StitchTrain(epochs=4, max_steps=500, layout="packed"))
    result = train_system(STITCHED_LLM, config, Start(out=tmp_path / "run"))
    assert result.step == 500
    bottom, top = open_donors(config)
    model = load_stitched(tmp_path / "run" / "model")
    found = compare_donors(model, bottom.model, top.model, load(config), load_test(config), precision="fp32")
    worse = max(found["bottom_donor"], found["top_donor"])
    assert found["stitched"] <= 1.3 * worse, found
    assert found["stitched"] <= found["unigram"] / 2, found
    assert found["stitched"] < found["cut_without_adapter"], found
