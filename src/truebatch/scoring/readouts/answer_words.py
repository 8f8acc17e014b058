"""Answers that are not one number: yes or no, and two numbers as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from truebatch.scoring.readouts.scale import Scale

Found = tuple[Literal["ok", "ambiguous", "out_of_scale", "cut", "no_number"], Any, str]
_WORDS = {"yes": "yes", "no": "no", "是": "yes", "否": "no"}
_LABELLED = re.compile(
    r"(?:score|rating|grade|answer|verdict|评分|分数|得分|打分|答案"
    r"|结论)(?:\s*\([^()]{0,30}\))?[\"'*]*\s*(?:is|=|:|为|是)\s*[\"'*]*"
    r"(?P<word>yes|no|是|否)(?![A-Za-z是否])(?!\s*(?:/|or\b|或))",
    re.IGNORECASE,
)


def read_yes_no(text: str, *, is_cut: bool) -> Found:
    """yes or no: in a JSON object, alone, or behind a label."""
    found = _json_scores(text)
    if found is not None:
        read = {_word(one) for one in found}
        if len(read) == 1 and None not in read:
            return "ok", read.pop(), ""
        return (
            ("cut" if is_cut or _is_open(text) else "ambiguous" if found else "no_number"),
            None,
            f"scores {found!r}"[:200],
        )
    bare = re.sub(r"^[\s\"'*`]+|[\s\"'*`.!。!]+$", "", text).lower()
    said = {_WORDS[match["word"].lower()] for match in _LABELLED.finditer(text)}
    if is_cut:
        return "cut", None, "the answer was cut before yes or no was complete"
    if bare in _WORDS:
        return "ok", _WORDS[bare], ""
    if len(said) == 1:
        return "ok", said.pop(), ""
    return ("ambiguous" if said else "no_number"), None, "neither yes nor no stands alone or behind a label"


def read_pair(text: str, scale: Scale, *, is_cut: bool) -> Found:
    """Two numbers as the list `score` of a JSON object."""
    found = _json_scores(text)
    if not found:
        return (
            ("cut" if is_cut or _is_open(text) else "no_number"),
            None,
            "two numbers are asked for as JSON, and there are none",
        )
    lists = [one for one in found if isinstance(one, list) and len(one) == 2 and all(map(_is_number, one))]
    if len(lists) < len(found) or any(one != lists[0] for one in lists):
        return "ambiguous", None, f"scores {found!r}"[:200]
    first, second = lists[0]
    if first not in scale or second not in scale:
        return "out_of_scale", None, f"{first} and {second} are not inside {scale.least:g} to {scale.most:g}"
    return "ok", (float(first), float(second)), ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _word(score: Any) -> str | None:
    if isinstance(score, bool):
        return "yes" if score else "no"
    return _WORDS.get(score.strip().lower().rstrip(".")) if isinstance(score, str) else None


def _is_open(text: str) -> bool:
    return text.count("{") > text.count("}")


def _json_scores(text: str) -> list[Any] | None:
    """The scores of all whole objects that are not inside another; None where nothing looks like an object."""
    if "{" not in text:
        return None
    return [score for found in _objects(text) for score in found]


def _objects(text: str) -> Iterator[list[Any]]:
    decoder, at = json.JSONDecoder(object_pairs_hook=lambda pairs: pairs), 0
    while (at := text.find("{", at)) >= 0:
        try:
            pairs, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        yield [value for name, value in pairs if name.strip().lower() in ("score", "评分")]
