"""Every schema people have becomes the same record; what cannot be read is named by file and line."""

from __future__ import annotations

import pytest

from truebatch.errors import DataError
from truebatch.hf.finetune.record_formats import Chat, Labelled, Plain, PromptCompletion, Tagged, read_record

QUESTION, ANSWER = {"role": "user", "content": "sky?"}, {"role": "assistant", "content": "blue"}
SYSTEM = {"role": "system", "content": "be brief"}

SAME = [
    {"messages": [SYSTEM, QUESTION, ANSWER]},
    {"conversations": [SYSTEM, QUESTION, ANSWER]},
    {"conversations": [{"from": "human", "value": "sky?"}, {"from": "gpt", "value": "blue"}], "system": "be brief"},
    {"instruction": "sky?", "input": "", "output": "blue", "system": "be brief"},
    {"messages": [SYSTEM, {"role": "User", "content": [{"type": "text", "text": "sky?"}]}, ANSWER]},
]


@pytest.mark.parametrize("sample", SAME, ids=lambda sample: next(iter(sample)))
def test_a_conversation_is_the_same_in_every_schema(sample):
    assert read_record("causal_lm", sample, "x:1") == Chat((SYSTEM, QUESTION, ANSWER))


def test_alpaca_joins_instruction_and_input_and_takes_the_history():
    sample = {"instruction": "name it", "input": "sky", "output": "blue", "history": [["hi", "hello"]]}
    chat = read_record("causal_lm", sample, "x:1")
    assert [m["content"] for m in chat.messages] == ["hi", "hello", "name it\nsky", "blue"]


def test_a_completion_of_messages_learns_the_completion_only():
    sample = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}
    assert read_record("causal_lm", sample, "x:1") == Chat((QUESTION, ANSWER, QUESTION, ANSWER), first_learned=3)


def test_the_other_records():
    assert read_record("causal_lm", {"text": "abc", "id": 4}, "x:1") == Plain("abc")
    assert read_record("causal_lm", {"prompt": "a", "completion": "b"}, "x:1") == PromptCompletion("a", "b")
    assert read_record("seq2seq", {"source": "a", "target": "b"}, "x:1") == PromptCompletion("a", "b")
    assert read_record("seq2seq", {"instruction": "a", "input": "c", "output": "b"}, "x:1") == PromptCompletion(
        "a\nc", "b"
    )
    assert read_record("sequence_classification", {"text": "a", "label": 0}, "x:1") == Labelled("a", None, 0)
    tagged = {"tokens": ["a", "b"], "ner_tags": [0, 1]}
    assert read_record("token_classification", tagged, "x:1") == Tagged(("a", "b"), (0, 1))


def test_calls_of_tools_reach_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    chat = read_record("causal_lm", {"messages": [QUESTION, call]}, "x:1")
    assert chat.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


WRONG = [
    ("causal_lm", 3, "not a JSON object"),
    ("causal_lm", {}, "keys: none"),
    ("causal_lm", {"mesages": []}, "did you mean 'messages'"),
    ("causal_lm", {"source": "a", "target": "b"}, "--task seq2seq"),
    ("causal_lm", {"messages": []}, "no messages"),
    ("causal_lm", {"messages": "hello"}, "no messages"),
    ("causal_lm", {"messages": ["hello"]}, "message 0 is not an object"),
    ("causal_lm", {"messages": [QUESTION]}, "no answer to learn from"),
    ("causal_lm", {"messages": [QUESTION, {"content": "blue"}]}, "message 1 does not say who speaks"),
    ("causal_lm", {"messages": [QUESTION, {"role": "asistant", "content": "x"}]}, "did you mean 'assistant'"),
    ("causal_lm", {"messages": [QUESTION, {"role": "assistant"}]}, "message 1 says nothing"),
    ("causal_lm", {"messages": [QUESTION, {"role": "assistant", "content": 3}]}, "message 1 says nothing"),
    ("causal_lm", {"instruction": "a"}, "needs a text under 'output'"),
    ("causal_lm", {"instruction": "a", "output": "b", "history": ["x"]}, "entry 0 of `history`"),
    ("causal_lm", {"prompt": "a"}, "needs a text under 'completion'"),
    ("causal_lm", {"text": None}, "needs a text under 'text'"),
    ("seq2seq", {"text": "a"}, "no source and target"),
    ("sequence_classification", {"text": "a"}, "no usable label"),
    ("sequence_classification", {"text": "a", "label": 0.5}, "no usable label"),
    ("sequence_classification", {"text": "a", "label": True}, "no usable label"),
    ("token_classification", {"tokens": ["a"], "tags": [0, 1]}, "1 words, 2 tags"),
    ("token_classification", {"tokens": [], "tags": []}, "no list of words"),
    ("token_classification", {"text": "a", "label": "b"}, "--task sequence_classification"),
]


@pytest.mark.parametrize(("task", "sample", "words"), WRONG)
def test_a_line_that_cannot_be_used_is_named(task, sample, words):
    with pytest.raises(DataError) as caught:
        read_record(task, sample, "data.jsonl:7")
    assert "data.jsonl:7" in caught.value.wrong
    assert words in str(caught.value)
