"""Data that would train on nothing, or not at all, is refused by its line; a run keeps its tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import Regex, pre_tokenizers

from tests.hf.finetune.folders import model_folder, tokenizer, write_lines
from truebatch.cli.app import run
from truebatch.errors import DataError
from truebatch.hf.finetune.label_map import label_names
from truebatch.hf.finetune.record_formats import read_record
from truebatch.hf.finetune.tokenize import FileTokenizer, encode_file


def test_half_a_character_is_refused_by_its_line():
    for sample in ({"text": "a \ud800 b"}, {"messages": [{"role": "user", "content": "\udfff"}]}):
        with pytest.raises(DataError, match="line 3 holds half a character"):
            read_record("causal_lm", sample, "line 3")


def test_an_identifier_is_not_taken_for_the_number_of_a_class():
    with pytest.raises(DataError, match="too large to be the number of a class"):
        label_names([0, 30_000_000], {}, name="data")


def encoder(task: str, max_length: int | None = None) -> FileTokenizer:
    return FileTokenizer(
        task=task, tokenizer=tokenizer(), fingerprint="", known_labels={}, max_length=max_length, overlong="cut",
        cache=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("token_classification", {"tokens": ["", ""], "tags": ["X", "Y"]}),
        ("causal_lm", {"prompt": "what is the colour of the sky", "completion": "blue"}),
    ],
    ids=["words without tokens", "answers that were cut away"],
)
def test_a_file_in_which_nothing_is_learned_is_refused(tmp_path, task, line):
    write_lines(tmp_path / "data.jsonl", [line] * 3)
    with pytest.raises(DataError, match="has nothing to learn from"):
        encode_file(encoder(task, max_length=3), tmp_path / "data.jsonl")


def test_a_run_does_not_go_on_with_another_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    file = model_folder(tmp_path / "llama") / "tokenizer.json"
    write_lines(tmp_path / "data.jsonl", [{"text": "hello the sky and the grass"}] * 12)
    command = ["train", "hf", "--model", "llama", "--data", "data.jsonl", "--task", "causal_lm"]
    command += ["--set", "train.samples_per_step=4", "--set"]
    assert run([*command, "train.max_steps=1"]) == 0
    changed = json.loads(file.read_text())
    changed["model"]["merges"] = []
    file.write_text(json.dumps(changed))
    capsys.readouterr()
    assert run([*command, "train.max_steps=2"]) == 2
    assert "the data is not what this run began with" in capsys.readouterr().err


def test_a_text_on_which_the_pattern_of_a_tokenizer_gives_up_is_named(tmp_path):
    given = tokenizer()
    given.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("a+a+a+a+a+b"), "isolated")
    write_lines(tmp_path / "data.jsonl", [{"text": "hello"}, {"text": "a" * 5000}])
    with pytest.raises(DataError, match=r"data.jsonl:2: the tokenizer gives up"):
        encode_file(replace(encoder("causal_lm"), tokenizer=given), tmp_path / "data.jsonl")
