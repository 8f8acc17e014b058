"""Answers and what they are worth: a number only where one unambiguous score inside the scale was said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truebatch_systems.vl_reward.judge.parse_score import Scale, parse_answer

NUMBERS = [
    ("8.500", 8.5),
    ("8", 8.0),
    ("0", 0.0),
    ("10.000", 10.0),
    ("**7.25**", 7.25),
    ("７．５", 7.5),
    ("8.5分", 8.5),
    ("Score (0-10): 7.5", 7.5),
    ("Score: 6", 6.0),
    ("I compared 2 images. Final score is 6.250", 6.25),
    ("评分：8.5", 8.5),
    ("最终得分：９", 9.0),
    ("得分为 4.5。", 4.5),
    ("4.5.", 4.5),
    ("1. colours 2. shape 3. light\nScore: 7.0", 7.0),
    ("naturalness score: 7\nartifact score: 9\nOverall score: 8", 8.0),
    ("7 / 10", 7.0),
    ("I would say 7 out of 10", 7.0),
    ("Score: 7/10", 7.0),
    ('{"score": 8, "reason": "ok"}', 8.0),
    ('{"score": 1}', 1.0),
    ('{"score": "7.5"}', 7.5),
    ('```json\n{"score": 3.5, "reasoning": "it {looks} odd"}\n```', 3.5),
    ('{"reasoning": {"colour": "good", "score_of_light": 3}, "score": 6}', 6.0),
    ('Here it is: {"score": 5}', 5.0),
    ("score: 85", None),
    ("11", None),
    ("-3", None),
    ("8,5", None),
    ("Score: 8,5", None),
    ("3.5 + 4.0 = 7.5", None),
    ("", None),
    ("I cannot judge this image.", None),
    ("Score: N/A", None),
    ("85/100", None),
    ("Score: 85/100", None),
    ("7-8", None),
    ("Score: 7-8", None),
    ("Score: 7 or 8", None),
    ("评分：7到8", None),
    ("Score: 7\nScore: 8", None),
    ("In 2024, 3 of 5 people", None),
    ('{"score": NaN}', None),
    ('{"score": true}', None),
    ('{"score": null}', None),
    ('{"score": 15}', None),
    ('{"score": [7, 8]}', None),
    ('{"score": "yes"}', None),
    ('{"score": 7} or rather {"score": 8}', None),
    ('{"score": 8, "reason": "cut', None),
    ("{score: 8}", None),
    ('{"rating": 8}', None),
    ("Score: eight", None),
    ("The score is between 5 and 6", None),
    ("1e1", None),
    ("Score: 7e1", None),
    ("Score: 7%", None),
    ("Score: 7 \u2013 8", None),
    ("Score: 7\u22128", None),
    ("Score: 3.5 + 4.0 = 7.5", None),
    ("Score: 7 ± 1", None),
    ("Score: 7+", None),
    ("Score: 7 and 8", None),
    ("Score (0-100): 7", None),
    ("Score (out of 5): 4", None),
    ("Score (1-10): 4", 4.0),
    ("Score: 4 points out of 5", None),
    ("Score: 4 points out of 10", 4.0),
    ("得分：8分（满分100分）", None),
    ("得分：8分（满分10分）", 8.0),
    ("Score: 7 - well done", 7.0),
    ("Score: 7. The light is right.", 7.0),
    ("Score: **7.5**", 7.5),
    ('{"score": 3, "score": 8}', None),
    ('{"score": 1' + "0" * 400 + "}", None),
    ('{"score": Infinity}', None),
]
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
    ("[7, 8]", None),
]


@pytest.mark.parametrize(("answer", "value"), NUMBERS)
def test_numbers(answer, value):
    found = parse_answer(answer, Scale())
    assert found.value == value, found
    assert (found.status == "ok") == (value is not None)
    assert bool(found.why) == (value is None)


@pytest.mark.parametrize(("answer", "value"), WORDS)
def test_yes_and_no(answer, value):
    assert parse_answer(answer, Scale(kind="yes_no")).value == value


@pytest.mark.parametrize(("answer", "value"), PAIRS)
def test_pairs(answer, value):
    assert parse_answer(answer, Scale(kind="pair")).value == value


def test_an_answer_that_was_cut_is_said_to_be_cut():
    assert parse_answer("8.", Scale(), is_cut=True).status == "truncated"
    assert parse_answer("Score: 1", Scale(), is_cut=True).status == "truncated"
    assert parse_answer('{"score": 8, "reasoning": "beca', Scale(), is_cut=True).status == "truncated"
    assert parse_answer('{"score": 8} Because', Scale(), is_cut=True).value == 8.0
    assert parse_answer('{"score": 8, "reasoning": "beca', Scale()).status == "truncated"


@given(
    st.text(alphabet='0123456789.-/,:{}[]" scoreyn评分是否', max_size=40), st.sampled_from(["number", "yes_no", "pair"])
)
def test_no_text_raises_and_no_number_is_outside_the_scale(text, kind):
    found = parse_answer(text, Scale(kind=kind))
    values = found.value if isinstance(found.value, tuple) else (found.value,)
    assert all(0 <= value <= 10 for value in values if isinstance(value, float))
    assert (found.value is None) == (found.status != "ok")
