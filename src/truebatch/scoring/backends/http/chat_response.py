"""Parse the responses of an OpenAI-compatible server strictly: whatever violates the protocol is an error.

body -> JSON without duplicate keys or NaN -> one choice -> the likeliest next tokens, or the text
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from truebatch.scoring.backends.interface import SampleError

ROUNDING = 1e-3
"""A log-probability this far above 0, or probabilities that sum to this much over 1, count as rounding."""
_MOST_TOKENS = 1 << 48
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Choice:
    """The single choice of a response."""

    values: Mapping[str, Any]
    tokens: int
    """Prompt and completion tokens, as counted by the server; 0 if it does not say."""


def read_choice(body: bytes | bytearray, content_type: str) -> Choice:
    """Parse a response with a single choice; anything else raises `SampleError`."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ("", "application/json"):
        _refuse(f"it is {kind[:_SHOWN]!r} and not JSON")
    found = _parse(body)
    choices = found.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        _refuse(f"one choice was requested, not {_shown(choices)} (in {_shown(found)})")
    return Choice(choices[0], _tokens(found.get("usage")))


def read_text(choice: Choice) -> tuple[str, str]:
    """The text of a choice, and how it ended."""
    message, ended = choice.values.get("message"), choice.values.get("finish_reason")
    if not isinstance(message, dict) or not isinstance(ended, str):
        _refuse(f"message and finish_reason are {_shown(message)} and {_shown(ended)}")
    text = message.get("content")
    if text is None:
        raise SampleError("model", "no_text", f"the server returned no text, with finish_reason {ended[:_SHOWN]!r}")
    if not isinstance(text, str):
        _refuse(f"the text is {_shown(text)}")
    return _unicode(text), _unicode(ended[:_SHOWN])


def read_chances(choice: Choice) -> dict[str, float]:
    """The probabilities of the likeliest next tokens; tokens with the same text are added up."""
    logprobs = choice.values.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    first = content[0] if isinstance(content, list) and content else None
    top = first.get("top_logprobs") if isinstance(first, dict) else None
    if not isinstance(top, list) or not top:
        _refuse(f"logprobs.content[0].top_logprobs is not there: {_shown(logprobs)}")
    found: dict[str, float] = {}
    for one in top:
        token, chance = _chance(one)
        found[token] = found.get(token, 0.0) + chance
    if sum(found.values()) > 1 + ROUNDING:
        _refuse(f"the probabilities of {len(top)} tokens sum to {sum(found.values()):g}")
    return found


def _chance(one: Any) -> tuple[str, float]:
    token, logprob = (one.get("token"), one.get("logprob")) if isinstance(one, dict) else (None, None)
    if not isinstance(token, str) or not isinstance(logprob, int | float) or isinstance(logprob, bool):
        _refuse(f"one of top_logprobs is {_shown(one)}")
    try:
        number = float(logprob)
    except OverflowError:  # an integer of hundreds of digits
        number = math.nan
    if not -math.inf < number <= ROUNDING:
        _refuse(f"the log-probability of {token[:_SHOWN]!r} is {_shown(logprob)}: none is above 0, all are finite")
    return _unicode(token), math.exp(min(0.0, number))


def _parse(body: bytes | bytearray) -> dict[str, Any]:
    try:
        found = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        _refuse(f"it is not valid JSON: {str(error)[:_SHOWN]}: {bytes(body[:_SHOWN])!r}")
    if not isinstance(found, dict):
        _refuse(f"it is {_shown(found)}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Parsers disagree about the value of a duplicate key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _tokens(usage: Any) -> int:
    if usage is None:
        return 0
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens < _MOST_TOKENS:
        _refuse(f"usage.total_tokens is no count: {_shown(usage)}")
    return tokens


def _unicode(text: str) -> str:
    """JSON can encode a lone surrogate, which no file could hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SampleError("model", "bad_answer", "the server's response contains a lone surrogate") from error
    return text


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object of {len(value)} ({', '.join(str(name)[:20] for name in list(value)[:8])})"
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:_SHOWN]


def _refuse(why: str) -> NoReturn:
    raise SampleError("model", "bad_answer", f"the server's response violates the protocol: {why}")
