"""The log is whole lines, never says NaN as a number, and ends exactly where the checkpoint is."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import DataError, RunError
from truebatch.testing.failpoints import armed
from truebatch.training.logging.metrics_jsonl import find_gaps, metrics_line, open_metrics, read_metrics


def lines_until(path, step):
    """The slow, obvious cut."""
    whole = [line for line in path.read_bytes().split(b"\n")[:-1] if line.strip()]
    return b"".join(line + b"\n" for line in whole if json.loads(line)["step"] <= step)


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(st.integers(0, 6), max_size=10).map(sorted),
    at=st.integers(0, 7),
    torn=st.floats(0, 1),
    text=st.text(),
)
def test_opening_at_a_step_cuts_exactly_there_and_repairs_a_torn_line(steps, at, torn, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    log = open_metrics(path)
    for step in steps:
        log.write(step, {"loss": step / 3, "text": text})
    log.close()
    expected = lines_until(path, at)
    torn_line = metrics_line(at, {"loss": 1.0, "text": text}).encode()
    with path.open("ab") as file:
        file.write(torn_line[: int(torn * len(torn_line))])
    log = open_metrics(path, step=at)
    assert path.read_bytes() == expected
    log.write(at + 1, {"loss": 0.5})
    log.close()
    assert path.read_bytes() == expected + metrics_line(at + 1, {"loss": 0.5}).encode() + b"\n"


def test_a_roll_back_takes_its_lines_out_of_the_open_log(tmp_path):
    log = open_metrics(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.write(step, {"try": 1})
    log.cut_after(1)
    assert log.num_cut == 2
    log.write(2, {"try": 2})
    log.close()
    assert [(line["step"], line["try"]) for line in read_metrics(log.path)] == [(1, 1), (2, 2)]


def test_a_run_from_the_beginning_starts_an_empty_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n')
    log = open_metrics(path)
    assert log.num_cut == 1
    log.close()
    assert path.read_bytes() == b""


def test_damage_in_the_middle_loses_one_line_and_says_so(tmp_path):
    path = tmp_path / "metrics.jsonl"
    damaged = b'{"step": 1}\n\xff\x00garbage\n{"step": 2}\n[3]\n{"step": "4"}\n{"step": 5'
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"metrics.jsonl is damaged in line 2[\s\S]*garbage"):
        read_metrics(path)
    log = open_metrics(path, step=5)
    log.close()
    assert log.num_cut == 4
    assert [words.partition(" of ")[0] for words in log.damage] == ["line 2", "line 4", "line 5"]
    assert "metrics.jsonl.damaged-1" in log.damage[0]
    assert (tmp_path / "metrics.jsonl.damaged-1").read_bytes() == damaged
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_a_torn_last_line_is_no_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1]
    log = open_metrics(path, step=1)
    log.close()
    assert log.damage == ()
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_line_without_end_is_one_damaged_line_and_not_several(tmp_path, monkeypatch):
    monkeypatch.setattr("truebatch.io.text_encoding.bounded_lines.__kwdefaults__", {"most": 100})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b'{"step": 2, "x": "' + 500 * b"a" + b'"}\n{"step": 3}\n')
    with pytest.raises(DataError, match="damaged in line 2"):
        read_metrics(path)
    log = open_metrics(path, step=3)
    log.close()
    assert len(log.damage) == 1
    assert [line["step"] for line in read_metrics(path)] == [1, 3]


def test_steps_without_a_line_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [metrics_line(step, {"loss": 1.0}) + "\n" for step in range(1, 21)]
    path.write_text("".join(lines) + metrics_line(20, {"validation_loss": 1.0}) + "\n")
    assert find_gaps(path, step=20) == ""
    path.write_text("".join(lines[:6] + lines[7:]))
    assert find_gaps(path, step=20) == "1 of 20 steps have no line in metrics.jsonl: 7"
    path.unlink()
    assert find_gaps(path, step=20) == "20 of 20 steps have no line in metrics.jsonl: 1, 2, 3, 4, 5 and 15 more"
    assert find_gaps(path, step=0) == ""


@settings(deadline=None, max_examples=60)
@given(values=st.dictionaries(st.text(max_size=5).filter(lambda n: n not in ("step", "nonfinite")), st.floats()))
def test_nan_and_infinity_are_null_and_named(values):
    line = json.loads(metrics_line(3, values), parse_constant=pytest.fail)
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    assert line.get("nonfinite", []) == bad
    assert all(line[name] is None for name in bad)
    assert all(line[name] == value for name, value in values.items() if name not in bad)


def test_tensors_arrays_and_lists_become_plain_numbers():
    values = {
        "a": torch.tensor(1.5),
        "b": np.float32(0.25),
        "ids": [3, 4],
        "lr": {"x": math.inf},
        "ok": True,
        "n": None,
    }
    assert json.loads(metrics_line(1, values)) == {
        "step": 1, "a": 1.5, "b": 0.25, "ids": [3, 4], "lr": {"x": None}, "ok": True, "n": None, "nonfinite": ["lr.x"],
    }  # fmt: skip
    assert json.loads(metrics_line(1, {"t": torch.tensor(math.nan)}))["nonfinite"] == ["t"]


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x"])
def test_what_is_not_a_number_or_text_is_refused_by_name(value):
    with pytest.raises(RunError, match="'odd'"):
        metrics_line(1, {"odd": value})


def test_a_full_disk_leaves_whole_lines_and_a_clear_message(tmp_path):
    path = tmp_path / "日志 metrics.jsonl"
    log = open_metrics(path)
    log.write(1, {"loss": 1.0})
    with armed("metrics.half_written:enospc:1"), pytest.raises(RunError, match="the disk is full"):
        log.write(2, {"loss": 2.0})
    log.write(2, {"loss": 3.0})
    log.close()
    log.close()
    assert [line["loss"] for line in read_metrics(path)] == [1.0, 3.0]
