"""Errors: caught as what they are, whole after a trip between processes, and English wherever they are kept."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

from tests import tasks
from truebatch import errors
from truebatch.cli.app import run
from truebatch.language.console import say_error
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.training.distributed import collectives
from truebatch.training.memory.oom import is_out_of_memory

BASES = {
    "ConfigError": ValueError,
    "DataError": ValueError,
    "PlanError": ValueError,
    "BatchError": ValueError,
    "AttentionError": ValueError,
    "LoaderError": RuntimeError,
    "LawError": RuntimeError,
    "RunError": RuntimeError,
    "CheckpointError": RuntimeError,
    "NonFiniteError": FloatingPointError,
    "MemoryLimitError": MemoryError,
    "RestartError": Exception,
}
CHINESE = re.compile("[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")


@pytest.fixture
def chinese(monkeypatch):
    monkeypatch.setenv("TRUEBATCH_LANG", "zh")


def test_every_class_is_listed_here():
    found = {name for name in vars(errors) if name.endswith("Error") and name != "TruebatchError"}
    assert found == set(BASES)


@pytest.mark.parametrize("name", BASES)
def test_an_error_is_caught_as_what_it_is(name):
    kind = getattr(errors, name)
    assert issubclass(kind, BASES[name])
    assert issubclass(kind, errors.TruebatchError)
    others = {ValueError, RuntimeError, FloatingPointError, MemoryError} - {BASES[name]}
    assert not issubclass(kind, tuple(others))


@pytest.mark.parametrize("name", BASES)
def test_an_error_comes_whole_out_of_another_process(name):
    error = pickle.loads(pickle.dumps(getattr(errors, name)("a", seen="b", do="c")))
    assert type(error).__name__ == name
    assert (error.wrong, error.seen, error.do, str(error)) == ("a", "b", "c", "a\n  seen: b\n  do:   c")


def test_the_page_of_codes_says_as_what_each_is_caught():
    page = (Path(__file__).parents[1] / "docs" / "codes.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+Error)` \| (?:`(\w+)` )?\|", page, re.MULTILINE)
    assert {name: base or "Exception" for name, base in listed} == {n: base.__name__ for n, base in BASES.items()}


def test_a_value_that_cannot_be_used_is_a_value_error():
    with pytest.raises(ValueError, match="exceed a limit"):
        build_plan([3, 900], PlanConfig(cells=600))


def test_what_was_said_of_memory_or_of_a_peer_is_not_judged_again(monkeypatch):
    said = "CUDA out of memory. Tried to allocate 2 GiB; connection reset by peer"
    monkeypatch.setattr(collectives, "num_ranks", lambda: 2)
    assert collectives.is_peer_failure(RuntimeError(said))
    for kind in (errors.MemoryLimitError, errors.RunError, errors.CheckpointError):
        assert not is_out_of_memory(kind("too large", seen=said, do="less"))
        assert not collectives.is_peer_failure(kind("too large", seen=said, do="less"))


def test_the_text_of_an_error_is_english_and_what_a_person_sees_is_not(chinese, capsys):
    error = errors.DataError("the file is empty", seen="a.jsonl", do="check the path")
    assert str(error) == "the file is empty\n  seen: a.jsonl\n  do:   check the path"
    say_error(error.wrong, error.seen, error.do)
    said = capsys.readouterr().err
    assert said.startswith("错误：")
    assert "\n  看到：a.jsonl\n  怎么办：检查" in said


def test_what_a_failed_run_keeps_is_english(chinese, tmp_path, capsys):
    folder = tmp_path / "run"
    settings = ["train.max_steps=6", "train.samples_per_step=8", "poison=3", "train.nonfinite=raise"]
    line = ["train", f"{Path(tasks.__file__)}:system", "--out", str(folder)]
    assert run([*line, *(word for setting in settings for word in ("--set", setting))]) == 1
    assert CHINESE.search(capsys.readouterr().err)
    assert json.loads((folder / "status.json").read_text())["message"].startswith("NonFiniteError: ")
    assert kept_in_chinese(folder) == []


def test_what_a_scoring_run_keeps_of_its_failures_is_english(chinese, tmp_path, capsys):
    samples = [{"id": "a", "user": "x"}, {"id": "b", "user": "x", "images": ["no such file.png"]}, {"id": "c"}]
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in samples) + "{\n")
    line = ["score", str(file), "--yesno", "--model", "scripted", "--out", str(tmp_path / "run")]
    assert run([*line, "--export", str(tmp_path / "run" / "scores.jsonl")]) == 3
    told = capsys.readouterr()
    assert CHINESE.search(told.out + told.err)
    rows = [json.loads(row) for row in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()]
    assert all(row["message"] for row in rows if row["status"] == "failed")
    assert kept_in_chinese(tmp_path / "run") == []


def kept_in_chinese(folder):
    """Files of a run in which a Chinese character stands, as it is or as JSON escapes it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    texts = {path: path.read_bytes().decode("utf-8", "ignore") for path in files if path.suffix != ".safetensors"}
    spelled = re.compile(r"\\u(3[0-9a-f]{3}|[4-9][0-9a-f]{3}|ff[0-9a-f]{2})")
    return [path.name for path, text in texts.items() if CHINESE.search(text) or spelled.search(text)]
