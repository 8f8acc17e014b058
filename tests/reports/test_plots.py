"""Pictures are well-formed, hold what was drawn, and are the same each time."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from truebatch.reports.plots import bars, curves, heat_map, histogram

LINES = {"one by one": ([1, 2, 3], [3.0, 2.0, 1.0]), "true batch": ([1, 2, 3], [3.0, 2.0, 1.0])}
DRAWN = {
    "curves": lambda: curves(LINES, title="Loss", x="step", y="loss", marks={"best": 2.0}, log_y=True),
    "bars": lambda: bars({"fixed": 0.8, "packed": 0.01}, title="Waste", y="share"),
    "histogram": lambda: histogram([1, 2, 2, 3, math.nan], title="Lengths", x="tokens"),
    "heat map": lambda: heat_map([[1.0, 2.0], [3.0, math.nan]], title="Cuts", rows=["a", "b"], columns=["1", "2"]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_svg_without_scripts_or_outside_links_and_comes_out_the_same_twice(name):
    text = DRAWN[name]()
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "<script" not in text
    assert not [v for e in root.iter() for k, v in e.attrib.items() if k.endswith("href") and not v.startswith("#")]
    assert text == DRAWN[name]()


def test_words_stay_words_in_any_script():
    text = curves({"真批次": ([1, 2], [1.0, 2.0])}, title="损失 $x_1$", x="步", y="损失")
    assert "损失 $x_1$" in text
    assert "步" in text


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "]]>", "\x00\x1b[31m", "&amp;", "$\\frac{", "\ud800"])
def test_hostile_names_stay_text(hostile):
    text = curves({hostile: ([1, 2], [1.0, 2.0]), "b": ([1], [1.0])}, title=hostile, x=hostile, y=hostile)
    ElementTree.fromstring(text)
    assert "<script" not in text


def test_values_that_are_not_finite_are_left_out():
    with_nan = curves({"a": ([1, 2, 3], [1.0, math.nan, 3.0])}, title="t", x="x", y="y")
    assert with_nan == curves({"a": ([1, 3], [1.0, 3.0])}, title="t", x="x", y="y")


def test_a_logarithmic_axis_has_plain_numbers():
    text = curves({"a": ([1, 2, 4], [0.01, 1.0, 100.0])}, title="t", x="x", y="y", log_x=True, log_y=True)
    assert "mathdefault" not in text
    assert ">100<" in text
    assert ">4<" in text
