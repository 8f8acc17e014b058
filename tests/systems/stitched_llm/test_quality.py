"""Trained to a quality: the embedded example as a newcomer gets it, slow."""

import pytest

from tests.systems.stitched_llm.quality import TINY, tiny


def check(row):
    found = row["perplexity"]
    assert row["over_worse_donor"] <= 1.3, row
    assert found["stitched"] <= found["unigram"] / 2, row
    assert found["stitched"] < found["least_squares_start"] < found["cut_without_adapter"], row


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("stored", "steps"), TINY)
def test_a_trained_adapter_comes_near_the_donors(tmp_path, tmp_path_factory, monkeypatch, stored, steps):
    if stored == "int8":
        pytest.importorskip("torchao")
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path_factory.getbasetemp() / "quality"))
    check(tiny(stored, steps, tmp_path / "run"))
