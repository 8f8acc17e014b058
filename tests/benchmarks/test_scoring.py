"""The scoring benchmark counts equal answers honestly, writes after every row, and names what it left out."""

from __future__ import annotations

import json

import pytest

from benchmarks.scoring import run as scoring
from benchmarks.scoring.run import make_config, run_bench


@pytest.mark.filterwarnings("ignore")
def test_a_dry_run_counts_equal_answers_and_names_what_cannot_run(tmp_path, monkeypatch):
    def refuse(*_):
        def run():
            raise RuntimeError("not on this machine")

        return run

    monkeypatch.setattr(scoring, "_continuous", refuse)
    lines = []
    result = run_bench(make_config(quick=True, seconds=1e9), out=tmp_path / "r.json", say=lines.append)
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(result))
    rows = {(row["what"], row["way"]): row for row in result["rows"]}
    assert (
        rows["texts", "8 padded right, transformers"]["equal"]
        < rows["texts", "8 padded right, transformers"]["compared"]
    )
    for (what, way), row in rows.items():
        if "right" not in way:
            assert row["equal"] == row["compared"] > 0, (what, way)
    assert rows["pictures, texts", scoring.TURNED]["same_bits"] == 4
    assert any("not on this machine" in one for one in result["left_out"])
    assert result["overheads"]["planning_seconds"] > 0


def test_nothing_begins_after_the_time(tmp_path):
    result = run_bench(make_config(quick=True, seconds=1e-9), out=None, say=lambda _: None)
    assert result["rows"] == []
    assert result["left_out"] == ["texts", "pictures, labels", "pictures, texts"]
