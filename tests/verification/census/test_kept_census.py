"""The census kept in the documentation: made by the command, and as good as the project promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from truebatch.verification.census.tables import markdown, summary_counts, summary_lines, wrong_rows

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def kept():
    return json.loads((DOCS / "results" / "census.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def popular():
    return json.loads((DOCS / "results" / "census_popular.json").read_text(encoding="utf-8"))


def test_the_page_is_made_from_the_rows_and_not_by_hand(kept, popular):
    assert (DOCS / "census.md").read_text(encoding="utf-8") == markdown(kept["facts"], kept["rows"])
    assert (DOCS / "census-popular.md").read_text(encoding="utf-8") == markdown(popular["facts"], popular["rows"])


def test_the_most_used_architectures_are_packed_and_equal(popular):
    assert popular["facts"]["command"] == f"truebatch census --top {len(popular['rows'])}"
    assert not wrong_rows(popular["rows"])
    packed = [row for row in popular["rows"] if row["verdict"] == "equal" and row["chosen"] == "packed"]
    assert len(packed) >= 140
    assert all(row["layouts"]["packed"]["check"]["verdict"] == "equal" and row["how"] for row in packed)


def test_no_architecture_is_wrong_unnoticed_and_no_row_is_missing(kept):
    assert not wrong_rows(kept["rows"])
    assert not [row for row in kept["rows"] if row["verdict"] in ("killed", "crashed", "failed")]


def test_it_covers_as_many_architectures_as_promised(kept):
    counts = summary_counts(kept["rows"])
    examined = {head: number["built tiny and examined"] for head, number in counts.items()}
    assert examined.pop("causal_lm") >= 140
    assert sum(examined.values()) >= 60
    assert counts["causal_lm"]["packed and equal"] >= 95


def test_a_leak_would_have_been_seen_in_every_row_that_counts_as_right(kept):
    right = [row for row in kept["rows"] if row["verdict"] in ("equal", "fell back")]
    assert right
    assert all(min(row["leak"]["planted"], row["leak"]["seen_by_verify"]) >= 100 for row in right)
    assert all(row["layouts"][row["chosen"]]["check"]["verdict"] == "equal" for row in right)


def test_the_summary_has_a_column_for_every_kind_of_head_and_lines_up(kept):
    _, head, *body = summary_lines(kept["facts"], kept["rows"])
    assert head.split() == list(summary_counts(kept["rows"]))
    assert {len(line) for line in body} == {len(head)}
    assert body[0].startswith("architectures ")
