"""Loss on the answers only, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hf.finetune.folders import FORGETFUL, MARKED, PLAIN, STRICT, chat, tokenizer
from truebatch.errors import DataError
from truebatch.hf.finetune.chat_template import encode_chat
from truebatch.hf.finetune.record_formats import Chat, read_record

TEXTS = st.text("abc 草绿\n", min_size=1, max_size=12)


def record(*contents: str) -> Chat:
    return read_record("causal_lm", chat(*contents), "x:1")


def pieces(template: str, given: Chat) -> list[tuple[str, bool]]:
    """The slow and obvious way, for these templates: every message apart, the answers and their ends learned."""
    out: list[tuple[str, bool]] = []
    for at, message in enumerate(given.messages):
        is_learned = message["role"] == "assistant" and at >= given.first_learned
        out += [(f"<|{message['role']}|>", False), (message["content"], is_learned), ("<|end|>", is_learned)]
    return out


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), st.booleans())
def test_every_token_of_an_answer_is_learned_and_no_other(template, turns, with_system):
    made = tokenizer(template)
    given_chat = record(*[text for turn in turns for text in turn])
    if with_system:
        given_chat = Chat(({"role": "system", "content": "be brief"}, *given_chat.messages))
    ids, labels = encode_chat(made, given_chat, "x:1")
    expected: list[tuple[int, bool]] = []
    for text, is_learned in pieces(template, given_chat):
        expected += [(one, is_learned) for one in made(text, add_special_tokens=False)["input_ids"]]
    assert ids == [one for one, _ in expected]
    assert labels == [one if is_learned else -100 for one, is_learned in expected]


def test_answers_before_the_completion_are_context():
    made = tokenizer(MARKED)
    given_chat = Chat(record("a", "b", "c", "abc").messages, first_learned=3)
    _, labels = encode_chat(made, given_chat, "x:1")
    assert made.decode([one for one in labels if one != -100]) == "abc<|end|>"


@pytest.mark.parametrize(
    ("template", "contents", "words"),
    [
        (FORGETFUL, ("a", "bb", "c", "d"), "writes earlier messages differently"),
        (STRICT, ("a", "b"), "no token to learn from"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", ("", "b"), ""),
        ("{{ messages[0]['content'] }}", ("a", "b"), "no token to learn from"),
        ("{{ nothing.at.all }}", ("a", "b"), "does not fit the chat template"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            ("gree", "n"),
            "belongs to a prompt and to an answer",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused_with_the_reason(template, contents, words):
    made = tokenizer(template)
    if not words:
        encode_chat(made, record(*contents), "x:1")
        return
    with pytest.raises(DataError) as caught:
        encode_chat(made, record(*contents), "data.jsonl:3")
    assert words in str(caught.value)
    assert "data.jsonl:3" in caught.value.wrong


def test_what_a_template_raises_is_shown():
    given_chat = Chat(({"role": "system", "content": "x"}, *record("a", "b").messages))
    with pytest.raises(DataError, match="no system"):
        encode_chat(tokenizer(STRICT), given_chat, "x:1")


def test_a_conversation_that_begins_with_an_answer_is_refused():
    with pytest.raises(DataError, match="begins with an answer"):
        encode_chat(tokenizer(), Chat(({"role": "assistant", "content": "b"},)), "x:1")
