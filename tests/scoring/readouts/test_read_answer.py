"""Answers of judges in English and Chinese, and what each of them says: a number only where one is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truebatch.errors import ConfigError
from truebatch.scoring.readouts.read_answer import read_answer
from truebatch.scoring.readouts.scale import ANY_NUMBER, Scale, parse_scale

TABLE = Path(__file__).with_name("answers.jsonl")
ROWS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
MOST_REFUSED = 0.05
"""Share of the answers that a person can read and the reader refuses."""


def read(row):
    options = row[2] if len(row) > 2 else {}
    return read_answer(row[0], parse_scale(options.get("scale", "0..10")), is_cut=options.get("cut", False))


def wanted(row) -> list[str]:
    return [one if not one.replace(".", "").isdigit() else float(one) for one in str(row[1]).split("|")]


def test_the_table_is_large_and_has_both_languages():
    assert len(ROWS) >= 300
    assert sum(any("\u4e00" <= char <= "\u9fff" for char in row[0]) for row in ROWS) >= 60
    assert len({(row[0], str(row[2:])) for row in ROWS}) == len(ROWS)


def test_no_number_of_the_table_is_wrong():
    found = [(row, read(row)) for row in ROWS]
    wrong = [(row, one) for row, one in found if one.value is not None and one.value not in [row[1], *wanted(row)]]
    assert wrong == []
    assert all(
        (one.value is None) == (one.status != "ok") and bool(one.why) == (one.status != "ok") for _, one in found
    )


def test_what_a_person_can_read_is_hardly_ever_refused():
    readable = [row for row in ROWS if not isinstance(row[1], str)]
    refused = [(row, read(row)) for row in readable if read(row).value is None]
    assert len(refused) <= MOST_REFUSED * len(readable), refused


def test_a_refusal_says_what_it_is():
    refused = [row for row in ROWS if isinstance(row[1], str)]
    other = [(row, read(row)) for row in refused if read(row).value is None and read(row).status not in wanted(row)]
    assert len(other) <= MOST_REFUSED * len(refused), other


def test_scales_are_read_and_wrong_ones_refused():
    assert (parse_scale("0..10"), parse_scale(" -5..5 ")) == (Scale(), Scale("number", -5, 5))
    assert parse_scale("") == ANY_NUMBER
    for wrong in ("10", "10..0", "a..b", "3..3"):
        with pytest.raises(ConfigError, match="scale"):
            parse_scale(wrong)


WORDS = [
    ('{"score":"yes","reasoning":"no visible fault"}', "yes"),
    ('{"score": "No", "reasoning": "would be yes if"}', "no"),
    ('{"score": "是"}', "yes"),
    ('{"score": false}', "no"),
    ("Yes.", "yes"),
    ("否", "no"),
    ("Score: no", "no"),
    ('{"score":"no","reasoning":"would be yes if', None),
    ("yes and no", None),
    ("There is no doubt: yes", None),
    ("Score: yes/no", None),
    ('{"score": 1}', None),
    ("", None),
]
PAIRS = [
    ('{"score": [7, 8.5], "reasoning": "x"}', (7.0, 8.5)),
    ('{"score": [15, -2]}', None),
    ('{"score": [7]}', None),
    ('{"score": [7, 8, 9]}', None),
    ('{"score": 7}', None),
    ('{"score": [true, false]}', None),
    ("[7, 8]", None),
]


@pytest.mark.parametrize(("answer", "value"), WORDS)
def test_yes_and_no(answer, value):
    found = read_answer(answer, Scale(kind="yes_no"))
    assert found.value == value
    assert (found.status == "ok") == (value is not None)


@pytest.mark.parametrize(("answer", "value"), PAIRS)
def test_pairs(answer, value):
    assert read_answer(answer, Scale(kind="pair")).value == value


@given(
    st.text(alphabet='0123456789.-/,:{}[]()*|"<>\n scoreynfi评分是否满分八十', max_size=60),
    st.sampled_from(["number", "yes_no", "pair"]),
    st.booleans(),
)
def test_no_text_raises_and_no_number_is_outside_the_scale(text, kind, is_cut):
    found = read_answer(text, Scale(kind=kind), is_cut=is_cut)
    values = found.value if isinstance(found.value, tuple) else (found.value,)
    assert all(0 <= value <= 10 for value in values if isinstance(value, float))
    assert (found.value is None) == (found.status != "ok")


@given(
    st.integers(0, 10), st.sampled_from(["Score: {}", "{}/10", "评分：{}分", '{{"score": {}}}', "<score>{}</score>"])
)
def test_a_number_that_is_cut_in_the_middle_is_never_read(number, form):
    whole = form.format(number)
    for end in range(len(whole)):
        found = read_answer(whole[:end], Scale(), is_cut=True)
        assert found.value in (None, number), (whole[:end], found)


@pytest.mark.parametrize("unit", ["{", "[", "7/10 ", "1", "八", "<score>", "8分", '{"a": 1, ', "\\boxed{", "Score: 7 "])
def test_long_answers_are_read_in_a_bounded_number_of_steps(unit):
    """Every rule looks at a bounded neighbourhood: 10,000 characters of anything do not stop a run."""
    assert read_answer(unit * (10_000 // len(unit)), Scale()).status in (
        "ok",
        "ambiguous",
        "no_number",
        "out_of_scale",
        "cut",
    )
