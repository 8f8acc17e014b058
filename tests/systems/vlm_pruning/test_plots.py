from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.systems.vlm_pruning.worlds import METHOD, backbone_settings, build, samples
from truebatch.errors import ConfigError
from truebatch.reports.artifacts import kept_findings
from truebatch.reports.tables import Table
from truebatch_systems.vlm_pruning.backbones.load import encoder_of
from truebatch_systems.vlm_pruning.config import EvaluationSettings
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples
from truebatch_systems.vlm_pruning.eval.evaluate import answer_samples
from truebatch_systems.vlm_pruning.eval.plots import Kept, draw_kept, kept_tokens, show

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def model():
    return build().eval()


@pytest.fixture(scope="module")
def encoder():
    return encoder_of(backbone_settings(), METHOD)


def test_kept_tokens_are_those_that_stand_in_the_caches(model, encoder):
    chosen = samples(4)
    said = answer_samples(model, encoder, chosen, max_new_tokens=1)
    for kept, answered in zip(kept_tokens(model, encoder, chosen), said, strict=True):
        assert [layer for layer, _ in kept.stages] == [1, 3]
        # what is left after layers 1 and 3 is what layers 2 and 4 saw
        assert [int(is_kept.sum()) for _, is_kept in kept.stages] == [
            answered.layer_tokens[2],
            answered.layer_tokens[4],
        ]
        assert sum(rows * columns for rows, columns in kept.grids) == answered.layer_tokens[0]
        first, second = (is_kept for _, is_kept in kept.stages)
        assert not (second & ~first).any()


def test_every_dropped_patch_is_covered_where_it_lies(encoder):
    (sample,) = samples(1, images=1)
    is_kept = np.zeros(16, dtype=np.bool_)
    is_kept[[0, 5]] = True
    svg = ET.fromstring(draw_kept(Kept(sample, ((4, 4),), ((1, is_kept),)), "two & <three>"))
    covers = svg.findall(f"{SVG}rect")
    assert len(covers) == 14
    assert len(svg.findall(f"{SVG}image")) == 2
    texts = [one.text for one in svg.findall(f"{SVG}text")]
    assert "after layer 1: 2 of 16" in texts
    assert any("said: two & <three>" in text for text in texts)
    shown = svg.findall(f"{SVG}image")[1]
    left, width = float(shown.get("x")), float(shown.get("width"))
    top = min(float(one.get("y")) for one in covers)
    in_first_row = sorted(float(one.get("x")) for one in covers if float(one.get("y")) == top)
    assert in_first_row == pytest.approx([left + width * column / 4 for column in (1, 2, 3)], abs=0.1)


def test_pictures_and_curve_are_kept_for_the_report(model, encoder, tmp_path):
    settings = EvaluationSettings(pictures=2, curve_budgets=(0.6, 1.0), max_new_tokens=1)
    dataset = EncodedSamples([{**s, "answers": []} for s in samples(3, images=1)], encoder)
    paths = show(SimpleNamespace(evaluation_settings=settings), model, dataset, tmp_path)
    found = dict(kept_findings(tmp_path))
    assert len(paths) == 4 == len(found)
    assert found["40-accuracy-by-budget"].startswith("<svg")
    table = found["41-accuracy-by-budget"]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["learned", "random", "attention", "diversity"]
    assert table.header[-1] == "100.0 %"


def test_what_cannot_be_drawn_is_said(encoder, tmp_path):
    config = SimpleNamespace(evaluation_settings=EvaluationSettings(pictures=1))
    first = build(method=replace(METHOD, stage="backbone"))
    with pytest.raises(ConfigError, match="nothing is pruned yet"):
        show(config, first, EncodedSamples(samples(1), encoder), tmp_path)
    name = "tiny-llava-next"
    other = encoder_of(backbone_settings(name), METHOD)
    with pytest.raises(ConfigError, match="no single place"):
        show(config, build(name), EncodedSamples(samples(1), other), tmp_path)
    assert not list(tmp_path.iterdir())


def test_patches_of_qwen_lie_in_their_merged_grid():
    name = "tiny-qwen2.5-vl"
    other = encoder_of(backbone_settings(name), METHOD)
    (kept,) = kept_tokens(build(name), other, samples(1, images=1))
    assert sum(rows * columns for rows, columns in kept.grids) == len(kept.stages[0][1])
