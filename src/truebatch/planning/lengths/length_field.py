"""Find the field that gives a sample's length, and read it.

The length is the number of entries of an integer list (token ids), the value of a number, or the characters of a text
(tokens with a tokenizer). Chat (`messages`), ShareGPT (`conversations`) and Alpaca records count all of their text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from truebatch.errors import DataError
from truebatch.io.text_encoding import nearest

Kind = Literal["number", "ids", "text", "chat"]
WHOLE = ""
"""The field name for a sample that is itself a number, a list of ids or text."""

NUMBER_FIELDS = ("length", "num_tokens", "n_tokens", "token_count", "seq_len")
IDS_FIELDS = ("input_ids", "token_ids", "ids", "tokens")
CHAT_FIELDS = ("messages", "conversations", "conversation")
ALPACA_FIELDS = ("instruction", "input", "output")
TEXT_FIELDS = ("text", "content", "sentence", "document", "prompt", "question")

_DIGITS = re.compile(r"-?[0-9]{1,19}")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Reading:
    """Which fields of a sample are measured, and how."""

    kind: Kind
    fields: tuple[str, ...]

    @property
    def words(self) -> str:
        """Description for reports: what is measured."""
        names = " + ".join(self.fields) if self.fields != (WHOLE,) else "the sample itself"
        verb = {"number": "number in", "ids": "entries of", "text": "text of", "chat": "all text in"}[self.kind]
        return f"{verb} {names}"


def choose_reading(sample: Any, place: str, field: str | None) -> Reading:
    """How to measure samples like this one: by `field` if given, else by the first known field."""
    if not isinstance(sample, Mapping):
        return _whole(sample, place, field)
    if field is not None:
        if field not in sample:
            _refuse_field(sample, place, field)
        # A CSV cell is always text, so digits count as a number unless the name says text.
        numeric = field not in TEXT_FIELDS
        return Reading(_kind(sample[field], f"{place}: {field}", numeric=numeric), (field,))
    if all(isinstance(sample.get(name), str) for name in (ALPACA_FIELDS[0], ALPACA_FIELDS[2])):
        return Reading("text", tuple(name for name in ALPACA_FIELDS if name in sample))
    for names, kinds in (
        (NUMBER_FIELDS, ("number",)),
        (IDS_FIELDS, ("ids", "number")),
        (CHAT_FIELDS, ("chat",)),
        (TEXT_FIELDS, ("text",)),
    ):
        for name in names:
            if _kind_or_none(sample.get(name), numeric=names is NUMBER_FIELDS) in kinds:
                return Reading(_kind(sample[name], place, numeric=names is NUMBER_FIELDS), (name,))
    return _only_field(sample, place)


def _whole(sample: Any, place: str, field: str | None) -> Reading:
    if field is not None:
        raise DataError(
            f"{place} has no fields, so {field!r} cannot be used",
            seen=_shown(sample),
            do="omit the field, or write samples as objects with named fields",
        )
    return Reading(_kind(sample, place), (WHOLE,))


def _only_field(sample: Mapping[str, Any], place: str) -> Reading:
    usable = {name: kind for name, value in sample.items() if (kind := _kind_or_none(value)) not in (None, "number")}
    if len(usable) == 1:
        name, kind = next(iter(usable.items()))
        assert kind is not None
        return Reading(kind, (name,))
    raise DataError(
        f"{place}: it is not clear which field gives the length of a sample",
        seen=f"fields {', '.join(map(str, sample)) or 'none'}",
        do="choose one with --field NAME (field=... in Python)",
    )


def _kind_or_none(value: Any, *, numeric: bool = False) -> Kind | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, np.integer)):
        return "number"
    if isinstance(value, str):
        return "number" if numeric and value.strip().isdigit() else "text"
    if isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0:
        first = value[0] if len(value) else 0
        return "chat" if isinstance(first, (Mapping, str)) else "ids"
    return None


def _kind(value: Any, place: str, *, numeric: bool = False) -> Kind:
    kind = _kind_or_none(value, numeric=numeric)
    if kind is None:
        raise DataError(
            f"{place} cannot be measured",
            seen=_shown(value),
            do="give a list of token ids, text, or an integer; or choose another field",
        )
    return kind


def read_length(reading: Reading, sample: Any, place: str, *, count_text: Callable[[str], int] = len) -> int:
    """The length of one sample; raises `DataError` with its location if the sample differs in kind from the first
    one."""
    if reading.kind == "number":
        return _number(_value(reading.fields[0], sample, place), place)
    if reading.kind == "ids":
        value = _value(reading.fields[0], sample, place)
        if isinstance(value, (str, Mapping)) or not hasattr(value, "__len__"):
            _refuse_mixed(reading, value, place)
        if reading.fields[0] in IDS_FIELDS and len(value) and isinstance(value[0], list | tuple):
            _refuse_nested(reading.fields[0], value, place)
        return len(value)
    return count_text(read_text_of(reading, sample, place))


def read_text_of(reading: Reading, sample: Any, place: str) -> str:
    """All text of a sample, if its text is what is measured."""
    parts = []
    for name in reading.fields:
        value = _value(name, sample, place) if name in reading.fields[:1] else _optional(name, sample)
        if reading.kind == "chat":
            parts += [_message(turn, place) for turn in _turns(value, reading, place)]
        elif isinstance(value, str):
            parts.append(value)
        else:
            _refuse_mixed(reading, value, place)
    text = "\n".join(parts) if reading.kind == "text" else "".join(parts)
    bad = None if text.isascii() else _SURROGATE.search(text)
    if bad:
        raise DataError(
            f"{place} holds half a character (a lone surrogate)",
            seen=f"{bad.group()!r} at character {bad.start()}",
            do="write the text again: a 4-byte character (for example an emoji) was cut in two",
        )
    return text


def _value(name: str, sample: Any, place: str) -> Any:
    if name == WHOLE:
        return sample
    if not isinstance(sample, Mapping) or name not in sample:
        _refuse_field(sample, place, name)
    return sample[name]


def _optional(name: str, sample: Mapping[str, Any]) -> Any:
    # The other fields of an Alpaca record may be missing or null if they are empty.
    value = sample.get(name)
    return "" if value is None else value


def _turns(value: Any, reading: Reading, place: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        _refuse_mixed(reading, value, place)
    return value


def _message(turn: Any, place: str) -> str:
    if isinstance(turn, str):
        return turn
    content = turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None
    if isinstance(content, list):
        return "".join(_part(part, place) for part in content)
    if content is None and isinstance(turn, Mapping) and "role" in turn:
        return ""  # A tool call: its arguments are not text of the conversation.
    if not isinstance(content, str):
        raise DataError(
            f"{place}: a message has no text",
            seen=_shown(turn),
            do='write messages as {"role": ..., "content": ...} or {"from": ..., "value": ...}',
        )
    return content


def _part(part: Any, place: str) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise DataError(
        f"{place}: a message has content other than text, whose number of tokens is not known here",
        seen=_shown(part),
        do="add a field `length` with the tokens after image placeholders are expanded",
    )


def _number(value: Any, place: str) -> int:
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DataError(f"{place}: the length is not an integer", seen=_shown(value), do="write an integer")
    return int(value)


def _refuse_field(sample: Any, place: str, field: str) -> NoReturn:
    known = [str(name) for name in sample] if isinstance(sample, Mapping) else []
    raise DataError(
        f"{place} has no field {field!r}{nearest(field, known)}",
        seen=f"fields {', '.join(known)}" if known else _shown(sample),
        do="every sample needs it; choose another with --field NAME (field=... in Python)",
    )


def _refuse_nested(name: str, value: Any, place: str) -> NoReturn:
    raise DataError(
        f"{place}: {name} is a list of lists, but token ids must be one list",
        seen=_shown(value),
        do=f"write {name}[0]: a tokenizer returns a list of samples if it is asked for tensors or given several texts",
    )


def _refuse_mixed(reading: Reading, value: Any, place: str) -> NoReturn:
    raise DataError(
        f"{place} differs from the first sample, which was measured by the {reading.words}",
        seen=_shown(value),
        do="give all samples the same fields, or choose a field they share with --field NAME (field=... in Python)",
    )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "nested very deeply"
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
