"""Curves drawn with characters."""

from __future__ import annotations

from truebatch.reports.terminal_chart import draw_curves


def test_equal_curves_are_drawn_as_one():
    lines = draw_curves({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0, 1.0]}, width=9, height=3)
    assert lines == ["  3.000 |*", "        |    *", "  1.000 |        *", "         o a, x b, * several"]


def test_a_curve_that_leaves_the_other_is_seen():
    lines = draw_curves({"a": [1.0, 1.0], "b": [1.0, 0.0]}, width=5, height=2)
    assert lines[:2] == ["  1.000 |*   o", "  0.000 |    x"]


def test_a_flat_curve_and_one_of_one_point_can_be_drawn():
    assert draw_curves({"a": [2.0]}, width=3, height=2)[0].endswith("|o")
