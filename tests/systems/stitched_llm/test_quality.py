"""Trained to a quality: the embedded example as a newcomer gets it, slow; and the figures that were kept of it."""

import json
from pathlib import Path

import pytest

from tests.systems.stitched_llm.quality import GAPS, TINY, tiny

KEPT = json.loads((Path(__file__).parents[3] / "docs/results/stitched_llm_quality.json").read_text())


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


def test_the_kept_figures_of_every_stored_form_are_within_the_promise():
    rows = {(row["stored"], row["steps"]): row for row in KEPT["tiny"]}
    assert set(rows) == set(TINY)
    for row in rows.values():
        check(row)
    full = rows["fp32", 100]
    for stored, size in (("bf16", 0.55), ("int8", 0.35)):
        row = rows[stored, 100]
        assert row["weights_bytes"] < size * full["weights_bytes"]
        for place in ("least_squares_start", "stitched"):
            assert row["perplexity"][place] == pytest.approx(full["perplexity"][place], rel=5e-3)


def test_the_kept_figures_of_real_weights_say_what_an_adapter_gives_back():
    rows = KEPT["real"]
    assert tuple(row["gap"] for row in rows) == GAPS
    for row in rows:
        found = row["perplexity"]
        assert found["donor"] < found["least_squares_start"] < found["cut_without_adapter"], row
        assert found["trained"] < found["least_squares_start"], row
