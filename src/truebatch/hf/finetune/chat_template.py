"""A conversation as token ids, with labels on what the assistant says and nowhere else.

A template that marks its answers (`{% generation %}`) says itself where they are. Otherwise the conversation is rendered
up to each answer and up to its end; where these are not beginnings of the whole, it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.hf.finetune.record_formats import ANSWERING, Chat
from truebatch.hf.heads.losses import IGNORE
from truebatch.hf.template_sandbox import apply_template

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
Ids = list[int]
Span = tuple[int, int]


def encode_chat(tokenizer: Any, chat: Chat, place: str) -> tuple[Ids, Ids]:
    """Token ids and labels of a conversation; labels of everything that is not an answer are -100."""
    if not tokenizer.is_fast:
        raise ConfigError(
            "finding answers needs a fast tokenizer",
            seen=f"{type(tokenizer).__name__} has no character offsets",
            do="save it as a fast one (tokenizer.json), or give prompt + completion",
        )
    if chat.first_learned == 0 and _MARKED.search(tokenizer.get_chat_template()):
        return _encode_marked(tokenizer, chat, place)
    text, spans = answer_spans(tokenizer, chat, place)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
    refuse_straddling(text, offsets, spans, place)
    is_learned = [any(a <= start < end <= b for a, b in spans) for start, end in offsets]
    return label_answers(encoded["input_ids"], is_learned, place)


def _encode_marked(tokenizer: Any, chat: Chat, place: str) -> tuple[Ids, Ids]:
    encoded = _templated(
        lambda: apply_template(
            tokenizer, list(chat.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        ),
        place,
    )
    return label_answers(encoded["input_ids"], [bool(one) for one in encoded["assistant_masks"]], place)


def label_answers(ids: Ids, is_learned: list[bool], place: str) -> tuple[Ids, Ids]:
    """Ids and labels; a sample without a learned token raises `DataError`."""
    if not any(is_learned):
        raise DataError(
            f"{place} has no token to learn from",
            seen=f"{len(ids)} tokens, none of them of an answer",
            do="check the chat template: it leaves the answers out",
        )
    return list(ids), [one if learned else IGNORE for one, learned in zip(ids, is_learned, strict=True)]


def answer_spans(tokenizer: Any, chat: Chat, place: str) -> tuple[str, list[Span]]:
    """The conversation as its template (of a tokenizer or a processor) writes it, and from where to where each learned
    answer goes."""
    whole = _render(tokenizer, chat.messages, place)
    spans = []
    for at, message in enumerate(chat.messages):
        if message["role"] != ANSWERING or at < chat.first_learned:
            continue
        if at == 0:
            raise DataError(
                f"{place} begins with an answer",
                seen=f"message 0 is of the {ANSWERING}",
                do="begin with the message that is answered",
            )
        before = _render(tokenizer, chat.messages[:at], place, is_asking=True)
        after = _render(tokenizer, chat.messages[: at + 1], place)
        if not (whole.startswith(after) and after.startswith(before)):
            _refuse_inconsistent(whole, before if not after.startswith(before) else after, at, place)
        spans.append((len(before), len(after)))
    return whole, spans


def _refuse_inconsistent(whole: str, part: str, at: int, place: str) -> None:
    same = next((i for i, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b), min(len(whole), len(part)))
    raise DataError(
        f"{place}: this chat template writes earlier messages differently once later ones follow",
        seen=f"message {at}: {part[max(0, same - 20) : same + 20]!r} alone, "
        f"{whole[max(0, same - 20) : same + 20]!r} in the whole conversation",
        do="mark the answers in the template with {% generation %}, give another one with --set chat_template=FILE, "
        "or write one answer a sample",
    )


def refuse_straddling(text: str, offsets: list[Span], spans: list[Span], place: str) -> None:
    """Raise where a token lies on both sides of the border of an answer."""
    borders = sorted({border for span in spans for border in span})
    for start, end in offsets:
        crossed = next((border for border in borders if start < border < end), None)
        if crossed is not None:
            raise DataError(
                f"{place}: one token belongs to a prompt and to an answer",
                seen=f"token {text[start:end]!r}, the border is after {text[start:crossed]!r}",
                do="remove the white space at that end of the answer, or mark the answers in the chat template",
            )


def _render(tokenizer: Any, messages: Any, place: str, *, is_asking: bool = False) -> str:
    text = _templated(
        lambda: apply_template(tokenizer, list(messages), tokenize=False, add_generation_prompt=is_asking), place
    )
    return str(text)


def _templated(call: Callable[[], Any], place: str) -> Any:
    try:
        return call()
    except Exception as error:  # A template is code of others and may raise anything.
        raise DataError(
            f"{place} does not fit the chat template",
            seen=f"{type(error).__name__}: {str(error)[:200]}",
            do="correct the roles of that conversation, or give another template with --set chat_template=FILE",
        ) from error


def render_messages(tokenizer: Any, messages: Any, place: str) -> str:
    """A conversation up to where the next answer begins."""
    return _render(tokenizer, messages, place, is_asking=True)


def render_question(tokenizer: Any, text: str) -> str:
    """A single question of the user, up to where the answer begins."""
    return render_messages(tokenizer, [{"role": "user", "content": text}], "the prompt")


def turn_end_ids(tokenizer: Any) -> set[int]:
    """The special token that a chat template writes behind an answer; none where it writes none."""
    if tokenizer.chat_template is None:
        return set()
    question = {"role": "user", "content": "question"}
    text = _render(tokenizer, [question, {"role": ANSWERING, "content": "answer"}], "a short conversation")
    behind = tokenizer(text.rpartition("answer")[2], add_special_tokens=False)["input_ids"][:1]
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    return set(behind) & special
