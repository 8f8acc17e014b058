"""From a judge's answer to a score, or to the reason why there is none. One parser for all backends.

An answer without one unambiguous score inside the scale never yields a number: no first number, no clamping, no default.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "parse_error", "truncated"]
Kind = Literal["number", "yes_no", "pair"]
Value = float | str | tuple[float, float]

_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_LABEL = r"(?:score|rating|grade|评分|分数|得分|打分|分值)"
_FINAL = r"(?:final|overall|total|最终|总体|综合|总)"
_HINT = r"(?:\s*\((?P<hint>[^()]{0,30})\))?"
"""A scale in brackets, as in `Score (0-10): 7`."""
_SAYS = r"\s*(?:is|=|:|为|是)\s*"
_JOINS = r"(?:[-+~*=<>,;&\u2010-\u2015\u2212±×→]|to\b|or\b|and\b|至|到|或|和)"
_AFTER = rf"(?![\d.]*\d)(?!e[-+]?\d)(?!\s*%)(?!\s*{_JOINS}\s*\d)(?!\s*(?:±|\+))"
"""Not the beginning of a range, of a sum, of a share, or of a number with a comma."""
_SLASH = r"\s*(?:points?\s*)?(?:/|out\s+of|of)\s*"
_LABELLED = re.compile(
    rf"(?P<final>{_FINAL}\s*)?{_LABEL}{_HINT}{_SAYS}\*{{0,2}}(?P<value>{_NUMBER}){_AFTER}(?:{_SLASH}(?P<of>\d+(?:\.\d+)?))?",
    re.IGNORECASE,
)
_FULL_MARKS = re.compile(r"(?:满分|总分)\s*(?:为|是|:)?\s*(?P<most>\d+)")
_OF = re.compile(rf"(?<![\d./])(?P<value>{_NUMBER})\s*(?:/|out of)\s*(?P<most>\d+(?:\.\d+)?)(?![\d./])", re.IGNORECASE)
_WORDS = {"yes": "yes", "no": "no", "是": "yes", "否": "no"}
_LABELLED_WORD = re.compile(
    rf"{_LABEL}{_HINT}{_SAYS}[\"'*]*(?P<word>yes|no|是|否)\b(?!\s*(?:/|or\b|或))", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Scale:
    """What a metric asks for."""

    kind: Kind = "number"
    least: float = 0.0
    most: float = 10.0


@dataclass(frozen=True, slots=True)
class Parsed:
    """A value, or why there is none."""

    status: Status
    value: Value | None = None
    why: str = ""


def parse_answer(text: str, scale: Scale, *, is_cut: bool = False) -> Parsed:
    """The score in an answer. `is_cut` says that the answer ended because no more tokens were allowed.

    A whole JSON object counts even if the answer was cut behind it; anything else in a cut answer may go on differently.
    """
    plain = unicodedata.normalize("NFKC", text).strip()
    found = _from_json(plain, scale)
    if found is not None:
        return Parsed("truncated", why=found.why) if is_cut and found.status != "ok" else found
    if is_cut:
        return Parsed("truncated", why="the answer was cut before a score was complete")
    if not plain:
        return Parsed("parse_error", why="the answer is empty")
    if scale.kind == "yes_no":
        return _from_words(plain)
    if scale.kind == "pair":
        return Parsed("parse_error", why="two numbers are asked for as JSON, and there is no JSON")
    return _from_text(plain, scale)


def _from_json(text: str, scale: Scale) -> Parsed | None:
    """What the JSON objects in the text say; None where there is nothing that looks like one."""
    if "{" not in text:
        return None
    objects = list(_objects(text))
    scores = [found["score"] for found in objects if "score" in found]
    if not scores:
        cut = text.count("{") > text.count("}")
        return Parsed("truncated" if cut else "parse_error", why="no JSON object with a score in it is complete")
    read = [_value(score, scale) for score in scores]
    if any(value is None for value in read) or len(set(read)) > 1:
        return Parsed("parse_error", why=f"the score is {scores[0]!r}" if len(scores) == 1 else f"scores {scores!r}")
    return Parsed("ok", read[0])


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Every complete JSON object that is not inside another one."""
    decoder, at = json.JSONDecoder(object_pairs_hook=_object), 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        if isinstance(found, dict):
            yield found
        at = end


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a score that is given twice is none."""
    scores = [value for name, value in pairs if name == "score"]
    return {**dict(pairs), "score": {"given more than once": scores}} if len(scores) > 1 else dict(pairs)


def _value(score: Any, scale: Scale) -> Value | None:
    if scale.kind == "yes_no":
        if isinstance(score, bool):
            return "yes" if score else "no"
        return _WORDS.get(score.strip().lower()) if isinstance(score, str) else None
    if scale.kind == "pair":
        both = score if isinstance(score, list) and len(score) == 2 else [None]
        numbers = [_number(one, scale) for one in both]
        return (numbers[0], numbers[1]) if len(numbers) == 2 and None not in numbers else None  # type: ignore[return-value]
    return _number(score, scale)


def _number(score: Any, scale: Scale) -> float | None:
    """A number inside the scale: written as one, or as a text that is nothing else."""
    if isinstance(score, str) and re.fullmatch(_NUMBER, score.strip()):
        score = float(score)
    if isinstance(score, bool) or not isinstance(score, int | float):
        return None
    return float(score) if scale.least <= score <= scale.most else None


def _from_words(text: str) -> Parsed:
    bare = re.sub(r"^[\s\"'*`]+|[\s\"'*`.!。!]+$", "", text).lower()
    if bare in _WORDS:
        return Parsed("ok", _WORDS[bare])
    said = {_WORDS[match["word"].lower()] for match in _LABELLED_WORD.finditer(text)}
    if len(said) == 1:
        return Parsed("ok", said.pop())
    return Parsed("parse_error", why="neither yes nor no stands alone or behind a label")


def _from_text(text: str, scale: Scale) -> Parsed:
    bare = re.sub(r"^[\s\"'*`]+|[\s\"'*`]+$", "", text).removesuffix("。").removesuffix("分").strip()
    if re.fullmatch(rf"{_NUMBER}\.?", bare):
        return _judged({float(bare.removesuffix("."))}, scale)
    if any(float(match["most"]) != scale.most for match in _FULL_MARKS.finditer(text)):
        return Parsed("parse_error", why="the answer is on another scale")
    labelled = [match for match in _LABELLED.finditer(text) if _is_ours(match, scale)]
    final = {float(match["value"]) for match in labelled if match["final"]}
    said = final or {float(match["value"]) for match in labelled}
    if not said:
        said = {float(match["value"]) for match in _OF.finditer(text) if float(match["most"]) == scale.most}
    return _judged(said, scale)


def _is_ours(match: re.Match[str], scale: Scale) -> bool:
    """Whether the end of a scale, in brackets or behind a slash, is the end of ours; 85/100 is another scale."""
    ends = re.findall(r"\d+(?:\.\d+)?", match["hint"] or "")[-1:] + ([match["of"]] if match["of"] else [])
    return all(float(end) == scale.most for end in ends)


def _judged(said: set[float], scale: Scale) -> Parsed:
    if len(said) != 1:
        return Parsed(
            "parse_error", why=f"several scores: {sorted(said)}" if said else "no score that is marked as one"
        )
    value = said.pop()
    if not scale.least <= value <= scale.most:
        return Parsed("parse_error", why=f"{value:g} is outside {scale.least:g} to {scale.most:g}")
    return Parsed("ok", value)
