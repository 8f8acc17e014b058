"""The scores in the JSON objects and tags of an answer, whole ones and one that was cut behind its score."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from truebatch.scoring.readouts.answer_claims import FINAL, STATED, WEAK, Claim, prose_claims, whole_value
from truebatch.scoring.readouts.answer_value import Value, read_value

_SCORE_WORDS = "score|rating|grade|reward|评分|分数|得分|打分|分值|总评分"
_SCORE = frozenset(_SCORE_WORDS.split("|"))
_FINAL_WORDS = (
    "finalscore|overallscore|totalscore|overallrating|finalrating|overall|finalgrade|final|averagescore|"
    "aggregatescore|最终评分|最终得分|综合评分|综合得分|总分|总得分|总体评分|最终分数"
)
_FINAL = frozenset(_FINAL_WORDS.split("|"))
_PLAIN = frozenset(["answer", "result", "value", "output", "finalanswer", "points", "答案", "结果"])
_MOST_WORDS = "max|maxscore|maximum|outof|scale|scalemax|range|满分|maxvalue"
_MOST = frozenset(_MOST_WORDS.split("|"))
_NEUTRAL_WORDS = (
    "evaluation|response|review|judgement|judgment|assessment|judge|data|verdict|feedback|final|image|评价|结果"
)
_NEUTRAL = _SCORE | _FINAL | _PLAIN | frozenset(_NEUTRAL_WORDS.split("|"))
_NAMES = ("criterion", "aspect", "dimension", "category", "metric", "item", "name", "维度", "指标", "项目")
_KEY = r"(?:score|rating|grade|final[_ ]?score|overall[_ ]?score|overall|评分|分数|得分)"
_OPEN_OBJECT = re.compile(
    r"\{\s*(?:\"[^\"{}\[\]]*\"\s*:\s*(?:\"(?:[^\"\\]|\\.)*\"|[-\w.]+)\s*,\s*)*?"
    rf"\"(?i:{_KEY})\"\s*:\s*(?:(?P<number>-?\d+(?:\.\d+)?)|\"(?P<text>[^\"\\]*)\")\s*,"
)
_TAG = re.compile(
    r"<(?P<name>(?:final[_\- ]?|overall[_\- ]?|total[_\- ]?)?(?:score|rating|grade)|answer|result|评分|得分"
    r"|分数|最终评分|总分)"
    r"(?:\s[^<>]*)?>(?P<inner>.*?)</(?P=name)\s*>",
    re.DOTALL | re.IGNORECASE,
)
_WRAPPED = re.compile(r"<(?P<name>[A-Za-z_\u4e00-\u9fff][\w\-]*)(?:\s[^<>]*)?>(?P<inner>.*?)</(?P=name)\s*>", re.DOTALL)
_SEVERAL = Value(math.nan, 0, doubt="several values are given")
_MOST_DEPTH = 20
_BRACKET = re.compile(r"[{\[]")
_OPENS = re.compile(r"\{\s*[\"'\w]|\[\s*\{\s*[\"'\w]")
_MOST_BRACKETS = 200
"""Brackets that are looked at; an answer with more is no answer."""


@dataclass(slots=True)
class Structured:
    """What the structured parts of an answer say."""

    claims: list[Claim] = field(default_factory=list)
    rest: str = ""
    """The text without them."""
    is_open: bool = False
    """True if an object was begun and not ended."""


class _Pairs(dict[str, Any]):
    """An object as JSON has it; `doubled` names keys that are given twice."""

    doubled: frozenset[str] = frozenset()


def read_objects(text: str) -> Structured:
    """The claims of all JSON objects in a text."""
    found, kept, at = Structured(), [], 0
    for match in islice(_BRACKET.finditer(text), _MOST_BRACKETS):
        if match.start() < at:
            continue
        value, end = _decode(text, match.start())
        if end is None:
            if _OPENS.match(text, match.start()):
                found.is_open = True
                found.claims += _cut_object(text, match.start())
                kept.append(text[at : match.start()])
                at = len(text)
                break
            kept.append(text[at : match.end()])
            at = match.end()
            continue
        claims = list(_claims(value, match.start())) if _has_objects(value) else None
        kept.append(text[at : match.start()] if claims is not None else text[at:end])
        found.claims += claims or []
        at = end
    found.rest = "".join([*kept, text[at:]])
    return found


def read_tags(text: str) -> Structured:
    """The claims of all tags such as <score>8</score>; one inside another tag is that of a part."""
    found, spans = Structured(), []
    for match in _TAG.finditer(text):
        name = re.sub(r"[\W_]", "", match["name"]).lower()
        outside = [one["name"] for one in _WRAPPED.finditer(text) if one.start() < match.start() < one.end()]
        part = next((one for one in outside if _plain(one) not in _NEUTRAL), "")
        if name in ("answer", "result") and whole_value(match["inner"]) is None:
            inner = [
                replace(claim, at=match.start(), strength=FINAL, is_closed=True)
                for claim in prose_claims(match["inner"])
            ]
        else:
            inner = [
                Claim(
                    FINAL if name in _FINAL or name == "answer" else STATED,
                    whole_value(match["inner"]),
                    match.start(),
                    is_closed=True,
                )
            ]
        found.claims += [replace(claim, strength=WEAK, name=part) if part else claim for claim in inner]
        spans.append(match.span())
    found.rest = _without(text, spans)
    found.is_open = bool(re.search(rf"<(?:final_|overall_)?(?:{_KEY})>(?!.*</)", text, re.DOTALL | re.IGNORECASE))
    return found


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    kept, at = [], 0
    for start, end in spans:
        kept.append(text[at:start])
        at = end
    return "\n".join([*kept, text[at:]])


def _has_objects(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(one, Mapping) for one in value))


def _claims(value: Any, at: int, path: tuple[str, ...] = (), depth: int = 0) -> Iterator[Claim]:
    """The claims of an object: of its score, and of those inside it."""
    if depth > _MOST_DEPTH:
        return
    if isinstance(value, list):
        for one in value:
            yield from _claims(one, at, path, depth + 1)
        return
    if not isinstance(value, Mapping):
        return
    doubled: frozenset[str] = getattr(value, "doubled", frozenset())
    named = next((str(value[key]) for key in value if _plain(key) in _NAMES and isinstance(value[key], str)), "")
    inside = (*path, named) if named else path
    most = next((_most(one) for key, one in value.items() if _plain(key) in _MOST), None)
    scores = [key for key in value if _plain(key) in _SCORE | _FINAL]
    if not scores and not any(isinstance(one, dict | list) for one in value.values()):
        scores = [key for key in value if _plain(key) in _PLAIN][:1]
    for key, one in value.items():
        if key in scores and not isinstance(one, Mapping):
            yield _claim(one, at, inside, key, most, is_doubled=key in doubled)
        elif key in scores and (inner := _value_of(one)) is not None:
            yield _claim(inner[0], at, inside, key, inner[1], is_doubled=key in doubled)
        else:
            yield from _claims(one, at, (*inside, str(key)), depth + 1)


def _claim(value: Any, at: int, path: tuple[str, ...], key: str, most: float | None, *, is_doubled: bool) -> Claim:
    part = " ".join(one for one in path if _plain(one) not in _NEUTRAL)
    is_final = _plain(key) in _FINAL or any(_plain(one) in _FINAL for one in path)
    strength = WEAK if part and not is_final else FINAL if is_final else STATED
    read = _SEVERAL if is_doubled else _scalar(value, most)
    return Claim(strength, read, at, part, is_closed=True)


def _scalar(value: Any, most: float | None) -> Value | None:
    """A JSON value as a number; None where it is none."""
    if isinstance(value, list):
        return _scalar(value[0], most) if len(value) == 1 else _SEVERAL
    if isinstance(value, str):
        found = whole_value(value)
        return replace(found, of=found.of if found.of is not None else most) if found is not None else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return Value(float(value), 0, most) if math.isfinite(value) else None
    except OverflowError:
        return Value(math.inf, 0, most)


def _value_of(value: Mapping[str, Any]) -> tuple[Any, float | None] | None:
    """`{"value": 8, "max": 10}` under the key of a score."""
    most = next((_most(one) for key, one in value.items() if _plain(key) in _MOST), None)
    inner = [
        one for key, one in value.items() if _plain(key) in ("value", "score", "number") and not isinstance(one, dict)
    ]
    return (inner[0], most) if len(inner) == 1 else None


def _most(value: Any) -> float | None:
    """The upper end that a key such as `max_score` or `scale` gives."""
    if isinstance(value, str):
        ends = re.findall(r"\d+(?:\.\d+)?", value)
        return float(ends[-1]) if ends else None
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None
    )


def _cut_object(text: str, at: int) -> list[Claim]:
    """The score of an object that was begun and not ended, if a comma follows the score and no object is inside."""
    found = _OPEN_OBJECT.match(text, at)
    if found is None or text[:at].count("[") > text[:at].count("]"):
        return []
    value = read_value(found["number"]) if found["number"] else whole_value(found["text"] or "")
    return [Claim(STATED, value, at, is_closed=True)]


def _plain(key: Any) -> str:
    return re.sub(r"[\s_\-]", "", str(key)).lower()


def _decode(text: str, at: int) -> tuple[Any, int | None]:
    """A value at a place, as JSON or as what is often written for it; (None, None) where none ends."""
    try:
        value, end = json.JSONDecoder(object_pairs_hook=_paired, strict=False).raw_decode(text, at)
        return value, end
    except (ValueError, RecursionError):
        pass
    closed = _bracket_end(text, at)
    if closed is None:
        return None, None
    end, part = closed, text[at:closed]
    tidy = re.sub(r"([{,]\s*)([A-Za-z_\u4e00-\u9fff][\w ]*?)(\s*:)", r'\1"\2"\3', re.sub(r",(\s*[}\]])", r"\1", part))
    for attempt in (re.sub(r",(\s*[}\]])", r"\1", part), tidy):
        try:
            return json.loads(attempt, object_pairs_hook=_paired, strict=False), end
        except (ValueError, RecursionError):
            continue
    try:
        return ast.literal_eval(part), end
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return (
            ((part, end) if part[0] == "[" else (None, end))
            if not re.match(r"\{\s*[\"'\w]+\s*:", part)
            else (part, end)
        )


def _paired(pairs: list[tuple[str, Any]]) -> _Pairs:
    found = _Pairs(pairs)
    found.doubled = frozenset(key for key in found if sum(name == key for name, _ in pairs) > 1)
    return found


def _bracket_end(text: str, at: int) -> int | None:
    """Behind the bracket that closes the one at a place; brackets in strings do not count."""
    depth, quote, index = 0, "", at
    while index < len(text):
        char = text[index]
        if quote:
            if char == "\\":
                index += 1
            elif char == quote:
                quote = ""
        elif char == '"':
            quote = char
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return index + 1
        index += 1
    return None
