"""The benchmark of judging runs the real pipeline, times its parts and leaves it as it was."""

from __future__ import annotations

import json

import pytest

from benchmarks.systems.vl_reward import make_config, run_reward_bench
from benchmarks.systems.vl_reward_workload import PARTS, PLACES, Clock, clocked


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "r.json"
    lines: list[str] = []
    before = [getattr(owner, name) for owner, name, _ in PLACES]
    result = run_reward_bench(make_config(quick=True, seconds=1e9), out=out, say=lines.append)
    assert [getattr(owner, name) for owner, name, _ in PLACES] == before
    return result, out, lines


@pytest.mark.filterwarnings("ignore")
def test_every_way_judges_all_pairs_with_the_answers_of_one_by_one(measured):
    result, out, lines = measured
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    assert [row["way"] for row in result["rows"]] == ["one by one", "batch 4", "a budget of cells"]
    for row in result["rows"]:
        assert row["equal"] == row["compared"] == row["samples"] == 8
        assert sum(row["statuses"].values()) == 8
    assert len(lines) == 4


def test_the_parts_of_the_time_are_all_measured_and_make_up_the_whole(measured):
    for row in measured[0]["rows"]:
        parts = row["milliseconds_a_sample"]
        assert set(parts) == {*PARTS, "other"}
        assert all(parts[name] > 0 for name in PARTS)
        assert sum(parts.values()) == pytest.approx(1000 / row["samples_per_second"])


def test_an_error_in_a_timed_part_is_raised_and_the_clock_taken_off():
    before = [getattr(owner, name) for owner, name, _ in PLACES]
    with pytest.raises(ZeroDivisionError), clocked(Clock()):
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name, _ in PLACES] == before


def test_nothing_begins_after_the_time():
    result = run_reward_bench(make_config(quick=True, seconds=1e-9), out=None, say=lambda _: None)
    assert result["rows"] == []
    assert result["left_out"] == ["one by one", "batch 4", "a budget of cells"]
