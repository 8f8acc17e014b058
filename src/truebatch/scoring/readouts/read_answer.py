"""From a model's answer to a score, or to the reason why there is none; one reader for every room.

A number is given only where one is meant as the score, on the declared scale. Nothing is clamped, rescaled or guessed.

answer -> thoughts removed -> JSON and tags -> prose -> the strongest claims, which must agree -> the scale
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from truebatch.scoring.readouts.answer_claims import STATED, WEAK, Claim, prose_claims
from truebatch.scoring.readouts.answer_json import read_objects, read_tags
from truebatch.scoring.readouts.answer_value import number_of
from truebatch.scoring.readouts.answer_words import read_pair, read_yes_no
from truebatch.scoring.readouts.number_words import CHINESE
from truebatch.scoring.readouts.plain_answer import plain_characters, plain_markup, strip_thoughts
from truebatch.scoring.readouts.scale import Scale

Status = Literal["ok", "ambiguous", "out_of_scale", "cut", "no_number"]
CUT_ENDINGS = ("length", "room", "max_tokens")
"""How a text ended that was cut at the token limit."""
_N = r"\d{1,9}(?:\.\d{1,9})?"
_SCALES = re.compile(
    rf"(?:\b(?:on|in|using|with|from|within)\s+)?(?:an?|the)?\s*\bscale\b\s*(?:of|from|is|:"
    rf"|\()?\s*(?:from\s+)?\(?{_N}\s*(?:-|–|—|to|through|~)\s*(?P<a>{_N})\)?"
    rf"|[(\[]\s*(?:from\s+)?[01](?:\.0)?\s*(?:-|–|—|to|~|至|到)\s*(?P<b>{_N})\s*分?\s*[)\]]"
    rf"|[(\[]\s*(?:out\s+of|max(?:imum)?(?:\s+(?:of|is))?:?|/)\s*(?P<c>{_N})\s*[)\]]"
    rf"|[(\[]?\s*满分\s*(?:为|是|:)?\s*(?P<d>{_N}|{CHINESE})\s*分?\s*[)\]]?"
    rf"|(?<=[A-Za-z分])[ \t]*(?:\bout[ \t]+of|/)[ \t]*(?P<h>{_N})(?=[ \t]*[:=])"
    rf"|(?P<e>{_N}|五|十|百)\s*分制"
    rf"|(?P<f>{_N}|ten|five)[- ]point\s+scale"
    rf"|\bmax(?:imum)?(?:\s+(?:possible\s+)?score)?\s*(?:of|is|:)\s*(?P<g>{_N})",
    re.IGNORECASE,
)  # fmt: skip
_REVISED = re.compile(
    r"second thought|\bactually\b|\binstead\b|\brather\b|\bcorrection\b|\bwait\b|\brevise|\bchange\b"
    r"|\breconsider|重新|其实|实际上|改为|更正|不对",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ScoreReading:
    """A value, or why there is none."""

    status: Status
    value: float | str | tuple[float, float] | None = None
    why: str = ""


def read_answer(text: str, scale: Scale, *, is_cut: bool = False) -> ScoreReading:
    """The score in an answer. `is_cut`: the answer ended because no more tokens were allowed.

    Of a cut answer counts what nothing that followed could have changed: a closed JSON object or tag, or a line that
    opens the answer with its score.
    """
    spoken, is_thinking = strip_thoughts(plain_characters(text))
    if scale.kind == "pair":
        return _reading(*read_pair(spoken, scale, is_cut=is_cut))
    if scale.kind == "yes_no":
        return _reading(*read_yes_no(spoken, is_cut=is_cut or is_thinking))
    if not spoken.strip():
        return ScoreReading("cut" if is_cut or is_thinking else "no_number", why="the answer is empty")
    claims, plain, is_open = _all_claims(spoken, scale)
    if is_cut or is_thinking or is_open:
        claims = _closed(claims)
        if not claims:
            return ScoreReading("cut", why="the answer was cut before a score was complete")
    return _judged(claims, plain, scale)


def _reading(status: Status, value: str | tuple[float, float] | None, why: str) -> ScoreReading:
    return ScoreReading(status, value, why)


def _all_claims(spoken: str, scale: Scale) -> tuple[list[Claim], str, bool]:
    """The claims of all parts, the prose with the scales that it names, and whether an object was begun and not ended."""
    objects = read_objects(spoken)
    tags = read_tags(objects.rest)
    plain = plain_markup(tags.rest)
    prose = list(prose_claims(_without_scales(plain, scale)))
    return [*objects.claims, *tags.claims, *prose], plain, objects.is_open or tags.is_open


def _without_scales(text: str, scale: Scale) -> str:
    """The text without the scales that it names, and without ranges from one end of ours to the other."""
    text = _SCALES.sub(" ", text)
    if not scale.is_bounded:
        return text
    least = {f"{scale.least:g}", "0", "1"}
    ends = (
        rf"(?<![\d.])(?:{'|'.join(map(re.escape, least))})\s*(?:-|–|—|to|and|~|至|到"
        rf"|\.\.)\s*{scale.most:g}(?![\d.]*\d)"
    )
    text = re.sub(rf"(?:(?:from|between)\s+)?{ends}", " ", text, flags=re.IGNORECASE)
    return re.sub(rf"总分\s*(?:为|是|:)?\s*{scale.most:g}\s*分?(?=.*(?:得|评|给|打))", " ", text, flags=re.DOTALL)


def _judged(claims: Sequence[Claim], plain: str, scale: Scale) -> ScoreReading:
    """What the strongest claims agree upon."""
    if not claims:
        return ScoreReading("no_number", why="no number that is marked as the score")
    strongest = max(claim.strength for claim in claims)
    said = [claim for claim in claims if claim.strength == strongest]
    values = [claim.value for claim in said if claim.value is not None]
    if not values:
        return ScoreReading("no_number", why="a score is named without a number")
    doubts = [value.doubt for value in values if value.doubt]
    numbers = {value.number for value in values}
    names = {claim.name for claim in said}
    if doubts or len(values) < len(said):
        return ScoreReading("ambiguous", why=doubts[0] if doubts else "a score is named with and without a number")
    if len(numbers) > 1 or (strongest == WEAK and len(names) > 1 and len({claim.at for claim in said}) > 1):
        return ScoreReading("ambiguous", why=f"several scores: {', '.join(f'{one:g}' for one in sorted(numbers))}")
    if scale.least < 0 and any(claim.is_dashed for claim in said):
        return ScoreReading("ambiguous", why="the dash before the number may be a minus")
    if strongest == STATED and _is_revised(said, claims, plain):
        return ScoreReading("ambiguous", why="the score is changed later in the answer")
    ends = {value.of for value in values if value.of is not None} | _named_ends(plain)
    is_starred = any(value.is_stars and value.of is None for value in values) and scale.most != 5
    return _on_scale(numbers.pop(), ends, scale, is_starred=is_starred)


def _closed(claims: Sequence[Claim]) -> list[Claim]:
    """The claims of a cut answer that count; none where one that may go on says something else."""
    closed = [claim for claim in claims if claim.is_closed]
    numbers = {claim.value.number for claim in closed if claim.value}
    is_disputed = any(
        claim.value is not None and claim.strength > WEAK and claim.value.number not in numbers for claim in claims
    )
    return [] if is_disputed else closed


def _is_revised(said: Sequence[Claim], claims: Sequence[Claim], plain: str) -> bool:
    """Whether another number is claimed behind words such as `on second thought`."""
    numbers = {claim.value.number for claim in said if claim.value}
    last = max(claim.at for claim in said)
    others = [one for one in claims if one.value and one.value.number not in numbers and one.at > last]
    return any(_REVISED.search(plain[last : other.at]) for other in others)


def _named_ends(text: str) -> set[float]:
    """The upper ends of the scales that an answer names."""
    found = (next(one for one in match.groups() if one) for match in _SCALES.finditer(text))
    words = {"五": 5.0, "十": 10.0, "百": 100.0}
    return {end for one in found if (end := words.get(one, number_of(one))) is not None}


def _on_scale(number: float, ends: set[float], scale: Scale, *, is_starred: bool) -> ScoreReading:
    if not scale.is_bounded:
        if ends or is_starred:
            return ScoreReading("ambiguous", why="the answer names a scale of its own; declare yours")
        if not math.isfinite(number):
            return ScoreReading("out_of_scale", why="the number is not finite")
        return ScoreReading("ok", number)
    if any(end != scale.most for end in ends):
        return ScoreReading("out_of_scale", why=f"the answer is on a scale up to {min(ends - {scale.most}):g}")
    if is_starred:
        return ScoreReading("ambiguous", why="stars are given without a scale")
    if number not in scale:
        return ScoreReading("out_of_scale", why=f"{number:g} is outside {scale.least:g} to {scale.most:g}")
    return ScoreReading("ok", number)
