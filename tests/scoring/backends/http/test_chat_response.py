"""Answers with a text: a text that was not given is no text, and what has another form is no answer."""

from __future__ import annotations

import json

import pytest

from tests.scoring.backends.http.fault_server import choice, value
from truebatch.scoring.backends.http.chat_response import read_choice, read_text
from truebatch.scoring.backends.interface import SampleError


def text_of(**changes):
    body = json.dumps(value(choices=[choice() | changes])).encode()
    return read_text(read_choice(body, "application/json; charset=utf-8"))


def test_a_text_is_what_the_server_says():
    assert text_of() == ("Yes", "length")
    assert text_of(message={"content": "", "refusal": None}, finish_reason="stop") == ("", "stop")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"message": {"content": None}}, "no_text"),
        ({"message": {"tool_calls": []}, "finish_reason": "tool_calls"}, "no_text"),
        ({"message": None}, "bad_answer"),
        ({"message": "Yes"}, "bad_answer"),
        ({"message": {"content": 5}}, "bad_answer"),
        ({"message": {"content": [{"type": "text", "text": "Yes"}]}}, "bad_answer"),
        ({"message": {"content": "a\udfff"}}, "bad_answer"),
        ({"finish_reason": None}, "bad_answer"),
        ({"finish_reason": ["stop"]}, "bad_answer"),
    ],
)
def test_what_is_no_text_is_a_failure(changes, kind):
    with pytest.raises(SampleError) as found:
        text_of(**changes)
    assert found.value.kind == kind


def test_a_huge_answer_is_shown_by_its_beginning():
    with pytest.raises(SampleError) as found:
        read_choice(json.dumps({"error": "x" * 10**6, "y" * 10**6: 1}).encode(), "application/json")
    assert len(str(found.value)) < 1000
