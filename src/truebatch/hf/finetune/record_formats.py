"""What a line of the user's data says, whatever schema it is written in.

messages, sharegpt, alpaca, prompt + completion -> Chat or Pair; text -> Plain; text + label, tokens + tags, source + target
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch.errors import DataError
from truebatch.io.text_encoding import nearest

Message = dict[str, Any]
ROLES = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "model": "assistant", "system": "system", "developer": "developer", "tool": "tool",
    "function": "tool", "observation": "tool",
}  # fmt: skip
"""Names of speakers in the schemas people have -> those of chat templates."""
ANSWERING = "assistant"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; what the assistant says is learned."""

    messages: tuple[Message, ...]
    first_learned: int = 0
    """Answers before this message are context only."""


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A text and what follows it, which is learned."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Plain:
    """A text, learned as a whole."""

    text: str


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or two, and its class."""

    text: str
    pair: str | None
    label: str | int


@dataclass(frozen=True, slots=True)
class Tagged:
    """Words and the class of each."""

    words: tuple[str, ...]
    tags: tuple[str | int, ...]


Record = Chat | PromptCompletion | Plain | Labelled | Tagged

KEYS = {
    "causal_lm": "messages | conversations | instruction + output | prompt + completion | text",
    "seq2seq": "source + target | prompt + completion | instruction + output",
    "sequence_classification": "text + label (and text_pair)",
    "token_classification": "tokens + tags",
}
"""What a line must hold, for messages."""
_SIGNS = (
    ("dpo", {"chosen", "rejected"}),
    ("seq2seq", {"source", "target"}),
    ("token_classification", {"tokens", "tags"}),
    ("sequence_classification", {"text", "label"}),
)


def read_record(task: str, sample: Any, place: str) -> Record:
    """One line of data as a record; anything else raises `DataError` with its file and line."""
    if not isinstance(sample, Mapping):
        raise _error(f"{place} is not a JSON object", f"a {type(sample).__name__}: {str(sample)[:60]!r}", task)
    _refuse_half_characters(sample, place)
    if task == "sequence_classification":
        return _labelled(sample, place, task)
    if task == "token_classification":
        return _tagged(sample, place, task)
    return _two_texts(sample, place, task) if task == "seq2seq" else _language(sample, place, task)


def _refuse_half_characters(sample: Mapping[str, Any], place: str) -> None:
    try:
        json.dumps(sample, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half a character, which no tokenizer can read",
            seen=f"a lone surrogate {error.object[error.start]!r} after {error.object[: error.start][-20:]!r}",
            do="correct that line, or remove it",
        ) from error


def _language(sample: Mapping[str, Any], place: str, task: str) -> Record:
    if {"chosen", "rejected"} <= set(sample):
        raise _error(f"{place} holds a pair of answers{_other_task(sample)}", _keys(sample), task)
    if "messages" in sample:
        return Chat(_messages(sample["messages"], place, "role", "content"))
    if "conversations" in sample:
        return _sharegpt(sample, place)
    if "instruction" in sample:
        return _alpaca(sample, place)
    if "prompt" in sample or "completion" in sample:
        return _completion(sample, place)
    if "text" in sample:
        return Plain(_string(sample, "text", place))
    if other := _other_task(sample):
        raise _error(f"{place} holds nothing to learn from{other}", _keys(sample), task)
    known = ["messages", "conversations", "instruction", "prompt", "completion", "text"]
    close = next((hint for key in sample if (hint := nearest(str(key), known))), "")
    raise _error(f"{place} holds nothing to learn from{close}", _keys(sample), task)


def _sharegpt(sample: Mapping[str, Any], place: str) -> Chat:
    turns = sample["conversations"]
    is_plain = isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and "role" in turns[0]
    messages = _messages(turns, place, *(("role", "content") if is_plain else ("from", "value")))
    return Chat((*_system(sample, place), *messages))


def _alpaca(sample: Mapping[str, Any], place: str) -> Chat:
    asked = _string(sample, "instruction", place)
    more = _string(sample, "input", place) if sample.get("input") else ""
    turns: list[Message] = []
    for at, pair in enumerate(sample.get("history") or []):
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise _error(f"{place}: entry {at} of `history` is not a pair of texts", repr(pair)[:80], "causal_lm")
        turns += [{"role": "user", "content": pair[0]}, {"role": ANSWERING, "content": pair[1]}]
    turns.append({"role": "user", "content": f"{asked}\n{more}" if more else asked})
    turns.append({"role": ANSWERING, "content": _string(sample, "output", place)})
    return Chat((*_system(sample, place), *turns))


def _completion(sample: Mapping[str, Any], place: str) -> Record:
    prompt = sample.get("prompt")
    if not isinstance(prompt, list):
        return PromptCompletion(_string(sample, "prompt", place), _string(sample, "completion", place))
    before = _messages(prompt, place, "role", "content", needs_answer=False)
    after = _messages(sample.get("completion"), place, "role", "content")
    return Chat((*before, *after), first_learned=len(before))


def read_messages(turns: Any, place: str, *, needs_answer: bool = True) -> tuple[Message, ...]:
    """A list of messages with roles and contents."""
    return _messages(turns, place, "role", "content", needs_answer=needs_answer)


def _system(sample: Mapping[str, Any], place: str) -> list[Message]:
    return [{"role": "system", "content": _string(sample, "system", place)}] if sample.get("system") else []


def _messages(turns: Any, place: str, who: str, what: str, *, needs_answer: bool = True) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise _error(f"{place} holds no messages", f"{str(turns)[:60]!r}", "causal_lm")
    messages = tuple(_message(turn, f"{place}: message {at}", who, what) for at, turn in enumerate(turns))
    if needs_answer and not any(message["role"] == ANSWERING for message in messages):
        raise DataError(
            f"{place} has no answer to learn from",
            seen=f"roles: {', '.join(message['role'] for message in messages)}",
            do="add a message of the assistant, or remove the conversation",
        )
    return messages


def _message(turn: Any, place: str, who: str, what: str) -> Message:
    if not isinstance(turn, Mapping):
        raise _error(f"{place} is not an object", f"{str(turn)[:60]!r}", "causal_lm")
    role = turn.get(who)
    if not isinstance(role, str) or role.lower() not in ROLES:
        hint = nearest(str(role), list(ROLES)) if role is not None else ""
        raise DataError(
            f"{place} does not say who speaks{hint}",
            seen=f"{who}={role!r}; keys: {', '.join(map(str, turn))}",
            do=f"give every message a {who!r}: user, assistant, system or tool",
        )
    content = _text_parts(turn.get(what))
    if content is None and not turn.get("tool_calls"):
        raise DataError(
            f"{place} says nothing",
            seen=f"{what}={turn.get(what)!r}; keys: {', '.join(map(str, turn))}",
            do=f"give every message a text under {what!r}",
        )
    kept = {key: value for key, value in turn.items() if key not in (who, what)}
    return {**kept, "role": ROLES[role.lower()], "content": content or ""}


def _text_parts(content: Any) -> str | None:
    """Text, also where it is written as a list of parts; None for anything that is not text."""
    if isinstance(content, list) and content and all(isinstance(p, Mapping) and "text" in p for p in content):
        return "".join(str(part["text"]) for part in content)
    return content if isinstance(content, str) else None


def _two_texts(sample: Mapping[str, Any], place: str, task: str) -> PromptCompletion:
    for source, target in (("source", "target"), ("prompt", "completion"), ("instruction", "output")):
        if source in sample or target in sample:
            more = f"\n{_string(sample, 'input', place)}" if source == "instruction" and sample.get("input") else ""
            return PromptCompletion(_string(sample, source, place) + more, _string(sample, target, place))
    raise _error(f"{place} holds no source and target", _keys(sample), task)


def _labelled(sample: Mapping[str, Any], place: str, task: str) -> Labelled:
    label: Any = sample.get("label")
    if not _is_label(label):
        raise _error(f"{place} has no usable label", f"label={label!r}; keys: {', '.join(map(str, sample))}", task)
    pair = _string(sample, "text_pair", place) if sample.get("text_pair") is not None else None
    return Labelled(_string(sample, "text", place), pair, label)


def _tagged(sample: Mapping[str, Any], place: str, task: str) -> Tagged:
    words, tags = sample.get("tokens"), sample.get("tags", sample.get("ner_tags"))
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise _error(f"{place} holds no list of words{_other_task(sample)}", f"tokens={str(words)[:60]!r}", task)
    if not isinstance(tags, list) or not all(_is_label(tag) for tag in tags):
        raise _error(f"{place} holds no list of tags", f"tags={str(tags)[:60]!r}", task)
    if len(words) != len(tags):
        raise _error(f"{place} needs one tag for each word", f"{len(words)} words, {len(tags)} tags", task)
    return Tagged(tuple(words), tuple(tags))


def _is_label(value: Any) -> bool:
    return (isinstance(value, str) and bool(value)) or (
        isinstance(value, int) and not isinstance(value, bool) and value >= 0
    )


def _string(sample: Mapping[str, Any], key: str, place: str) -> str:
    value = sample.get(key)
    if not isinstance(value, str):
        raise DataError(
            f"{place} needs a text under {key!r}",
            seen=f"{key}={value!r}; keys: {', '.join(map(str, sample))}"[:200],
            do="correct that line, or remove it",
        )
    return value


def _keys(sample: Mapping[str, Any]) -> str:
    return f"keys: {', '.join(map(str, sample)) or 'none'}"


def _error(wrong: str, seen: str, task: str) -> DataError:
    return DataError(wrong, seen=seen, do=f"for {task} a line holds {KEYS[task]}")


def _other_task(sample: Mapping[str, Any]) -> str:
    return next((f"; it looks like data for --task {task}" for task, keys in _SIGNS if keys <= set(sample)), "")
