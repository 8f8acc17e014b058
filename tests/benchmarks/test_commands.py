"""Every command as it is typed: how each ended is judged, and what was not run is never counted as right."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.commands.lines import WORDS, Line, make_lines
from benchmarks.commands.process import Place
from benchmarks.scripts.commands import CommandsConfig, run_all


@pytest.fixture
def place(tmp_path):
    words = {**WORDS["tiny"], "{device}": "cpu"}
    return Place(
        work=tmp_path, log=tmp_path / "all.log", words=words, environment={**os.environ, "TRUEBATCH_LANG": "en"}
    )


def typed(place, *lines, seconds=60.0):
    until = time.monotonic() + seconds
    return {row.name: row for row in run_all(lines, place, CommandsConfig(together=2), until=until)}


def test_a_line_is_right_only_with_its_exit_code_and_its_words(place):
    found = typed(
        place,
        Line(name="right", command="env", says=("python",)),
        Line(name="other words", command="env", says=("nothing says this",)),
        Line(name="other code", command="plan nothing.jsonl"),
        Line(name="code asked for", command="plan nothing.jsonl", code=2),
    )
    assert {name: row.verdict for name, row in found.items()} == {
        "right": "right", "other words": "WRONG", "other code": "WRONG", "code asked for": "right",
    }  # fmt: skip
    assert found["other code"].said.startswith("exit 2 instead of 0: error:")
    assert place.log.read_text(encoding="utf-8").count("\n$ truebatch ") == 4


def test_what_is_not_run_says_why_and_is_not_right(place):
    found = typed(
        place,
        Line(name="wrong", command="env", code=3),
        Line(name="behind it", command="env", after=("wrong",)),
        Line(name="behind that", command="env", after=("behind it",)),
        Line(name="without a package", command="env", needs=("no_such_package",)),
    )
    assert found["behind it"].verdict == found["behind that"].verdict == "not run"
    assert (found["without a package"].verdict, found["without a package"].said) == ("skipped", "needs no_such_package")


def test_nothing_begins_when_the_time_is_up_and_what_takes_too_long_is_ended(place):
    (late,) = typed(place, Line(name="late", command="env"), seconds=0.0).values()
    assert (late.verdict, late.said) == ("not run", "the time is up")
    (slow,) = typed(place, Line(name="slow", command="doctor --drill", limit=0.5)).values()
    assert (slow.verdict, slow.code) == ("WRONG", -9)


def test_all_commands_and_the_five_systems_are_among_the_lines():
    text = "\n".join(line.command for line in make_lines(is_gpu=True))
    words = (
        "demo",
        "fit",
        "train hf",
        "--lora",
        "verify",
        "evaluate",
        "generate",
        "--labels",
        "--generate",
        "pictures.jsonl",
    )
    systems = ("chinese_gpt", "seqset_vae", "stitched_llm", "vlm_pruning", "vl_reward")
    assert [word for word in (*words, *systems, "report", "doctor", "gradient_checkpointing") if word not in text] == []
    names = [line.name for line in make_lines(is_gpu=True)]
    assert len(set(names)) == len(names)
    assert {name for line in make_lines(is_gpu=True) for name in line.after} <= set(names)
