"""Messages in Chinese: every sentence has one, nothing of what is said is lost, and English stays as it was."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.language.collect import all_sentences, catalogue_of, everything_known, faults, missing, numbered, silent
from truebatch.cli.app import run
from truebatch.errors import DataError
from truebatch.language import translate
from truebatch.language.console import error_text
from truebatch.language.locale import language
from truebatch.language.translate import HOLE, Sentence, cut, in_chinese, in_words, whole_words

PARTS = sorted(all_sentences())


@pytest.fixture
def chinese(monkeypatch):
    monkeypatch.setenv("TRUEBATCH_LANG", "zh")


@pytest.mark.parametrize("part", PARTS)
def test_every_sentence_of_the_package_has_a_chinese_one(part):
    lacking = missing(part)
    assert not lacking, f"python -m tests.language.collect missing {part}: {lacking[:20]}"


@pytest.mark.parametrize("part", PARTS)
def test_a_chinese_sentence_has_the_holes_of_the_english_one(part):
    wrong = {english: faults(english, chinese) for english, chinese in catalogue_of(part).items()}
    assert not {english: fault for english, fault in wrong.items() if fault}


@pytest.mark.parametrize("part", PARTS)
def test_no_catalogue_keeps_what_is_no_longer_said(part):
    assert set(catalogue_of(part)) <= set(all_sentences()[part])
    assert not silent(part) & set(everything_known())


def test_a_sentence_is_found_by_its_words_and_its_values_are_kept(monkeypatch):
    entries = [
        ("{0} samples are longer than {1}", "{0} 个样本超过 {1}"),
        ("{0} is wrong: {1}", "{0} 有误：{1}"),
        ("check the path", "检查路径"),
    ]
    monkeypatch.setattr(translate, "_entries", lambda: entries)
    translate.catalogue.cache_clear()
    try:
        assert in_chinese("12 samples are longer than 8") == "12 个样本超过 8"
        assert in_chinese("a.txt is wrong: 3 samples are longer than 2") == "a.txt 有误：3 个样本超过 2"
        assert in_chinese("  check the path\nunknown words") == "  检查路径\nunknown words"
        assert in_chinese("something else; check the path") == "something else；检查路径"
    finally:
        translate.catalogue.cache_clear()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a b", "c, ", "; x ", " of "]), min_size=1, max_size=4), st.data())
def test_whatever_fills_the_holes_comes_back(pieces, data):
    """Joined again, the pieces and what was found between them are the text, however often a piece occurs in it."""
    values = [data.draw(st.text("abc,; xof", max_size=8)) for _ in pieces]
    text = "".join(piece + value for piece, value in zip(pieces, values, strict=True)) + "."
    english = numbered("".join(piece + "\0" for piece in pieces) + ".")
    cuts, holes = cut(english)
    found = Sentence(cuts, frozenset(w for c in cuts for w in whole_words(c)), holes, "").match(text)
    assert found is not None
    assert "".join(piece + value for piece, value in zip(cuts, [*found, ""], strict=True)) == text


def test_holes_without_end_take_no_time():
    sentence = Sentence(("", *[", "] * 30, "!"), frozenset(), tuple(range(31)), "")
    assert sentence.match("a, " * 20_000) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LC_ALL": "", "LC_MESSAGES": "zh_TW", "LANG": "en_US"}, "zh"),
        ({"TRUEBATCH_LANG": "zh", "LC_ALL": "C"}, "zh"),
        ({"TRUEBATCH_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
    ],
)
def test_the_variable_counts_before_the_locale(environment, words):
    assert language(environment) == words


def test_an_error_is_chinese_where_it_is_shown_and_english_in_its_parts(chinese):
    error = DataError("the file is empty", seen="a.jsonl", do="check the path")
    assert (error.do, str(error)) == ("check the path", "the file is empty\n  seen: a.jsonl\n  do:   check the path")
    assert "看到：a.jsonl" in error_text(error.wrong, error.seen, error.do)
    assert f"DataError: {in_words(error.wrong)}\n  看到：a.jsonl\n  怎么办：" in in_words(f"DataError: {error}")


def test_help_and_mistakes_are_chinese(chinese, capsys):
    assert run(["plan", "--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("用法：truebatch plan")
    assert "truebatch plan" in told.partition("示例")[2]
    assert run(["plan", "--nosuch"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("错误：")
    assert "--nosuch" in told


def test_another_language_is_refused_in_english(monkeypatch, capsys):
    monkeypatch.setenv("TRUEBATCH_LANG", "fr")
    assert run(["env"]) == 2
    assert "TRUEBATCH_LANG=fr" in capsys.readouterr().err


def test_the_holes_are_numbered_in_their_order():
    assert all(
        [int(hole) for hole in HOLE.findall(text)] == list(range(len(HOLE.findall(text))))
        for texts in all_sentences().values()
        for text in texts
    )
