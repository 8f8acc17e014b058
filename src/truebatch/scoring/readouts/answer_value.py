"""The number at a place of an answer, with the scale that it names itself, or why it is not one number.

`8/10` -> 8 of 10; `85 %` -> 85 of 100; `7-8`, `7+`, `about 7`, `8,5` -> in doubt; `8th`, `3 objects` -> no number.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from truebatch.scoring.readouts.number_words import CHINESE, ENGLISH, chinese_value, english_value

_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,9}(?:\.\d{1,30})?|\d{1,30}(?:\.\d{1,30})?|\.\d{1,30})(?!\d)"
NUMBER = rf"[-+]?{_DIGITS}"
_OPEN = r"[ \t]*[\"'“‘「【(\[{$]*[ \t]*"
_CLOSE = r"[ \t]*[\"'”’」】)\]}$]*"
HEDGE = (
    r"(?:about|around|roughly|approximately|approx\.?|nearly|almost|close to|~|≈|>=?|<=?|≥|≤|at (?:least|most)|"
    r"above|below|over|under|less than|more than|(?:some\w* )?between|(?:some\w* )?from|up to|no (?:more|less) than|"
    r"不低于|不高于|不到|不足|不超过|低于|高于|超过|大于|小于|至少|至多|最多|最少|大约|约为?|接近|将近)"
)
_VALUE = re.compile(
    rf"{_OPEN}(?P<hedge>{HEDGE}[ \t]*)?(?:an? |a solid )?"
    rf"(?P<number>(?<![A-Za-z0-9_.,]){NUMBER}|(?<![A-Za-z0-9_]){ENGLISH}\b|{CHINESE})",
    re.IGNORECASE,
)
_UNIT = r"(?:points?\b|pts?\b|marks?\b|分(?![钟之辨别米制割布析类散明外数])|(?P<stars>stars?\b|星))"
_OF = re.compile(
    rf"{_CLOSE}[ \t]*(?:{_UNIT})?{_CLOSE}[ \t]*[(\[]?[ \t]*(?:/|out[ \t]+of|of|满分(?:为|是|:)?)[ \t]*(?:a[ \t]+)?"
    rf"(?:maximum[ \t]+|possible[ \t]+|total[ \t]+)?(?:of[ \t]+)?(?P<of>(?<![A-Za-z0-9_.,]){_DIGITS}"
    rf"|{ENGLISH}\b|{CHINESE})(?![\d])(?!\.\d)(?!/\d)"
    rf"(?:[ \t]*{_UNIT.replace('stars', 'stars2')})?",
    re.IGNORECASE,
)
_PERCENT = re.compile(rf"{_CLOSE}[ \t]*(?:%|％|per[ \t]?cent\b|百分)", re.IGNORECASE)
_UNITS = re.compile(rf"{_CLOSE}[ \t]*{_UNIT}", re.IGNORECASE)
_NEXT = rf"(?:[\"'(\[]*[-+]?\d|{ENGLISH}\b[^a-z]*$)"
_SEVERAL = re.compile(
    rf"{_CLOSE}[ \t]*(?:(?:-|–|—|‒|―|‐|~|to\b|or\b|and\b|vs\.?|versus\b|minus\b|plus\b|\+|\*|×|±|/|:|,|;|=|<|>|&"
    rf"|至|到|或者?|和|、|，)[ \t]*(?:then[ \t]+)?{_NEXT}|(?:\+|±|\^|→|⇒|->|=>|\.\.|·)|[ \t]+[.,]?\d"
    rf"|[.][ \t]+\d+(?:\.\d+)?[ \t]*(?:$|\n)"
    rf"|[.,]\d|[-–](?=[\s.]*(?:$|\n))(?<=\d[-–])|(?:至|到|或者?|~|-|–)[ \t]*{CHINESE}"
    r"|[ \t]*\([ \t]*[-+][ \t]?\d|[^\n.。]{0,12}?\b(?:maybe|perhaps|possibly|could be"
    r"|or even)\b[^\n.。]{0,12}?\d|[ \t]*(?:左右|以上|以下|上下|之间|多分)"
    r"|[ \t,]*(?:or so|or (?:higher|lower|above|below|more|less)|and (?:above|up|higher)|[-(]?ish\b|rounded"
    r"|rounds?\b))",
    re.IGNORECASE,
)
_COUNTED = re.compile(
    r"[A-Za-z_]|[-–][A-Za-z]|[ \t]*[个只张条处次年月日号位项种名岁秒米步幅天小]|(?:st|nd|rd|th)\b"
    r"|[ \t]*(?:points?|pts?|marks?|分)?[ \t]*(?:lower|higher|less|more|fewer|below|above|off|deducted|short"
    r"|behind|ahead)\b"
)
_FOR_EACH = re.compile(
    r"[^\n.。]{0,12}?\bfor\b[^\n.。\d]{1,40}(?:,|;|and|but|while|，|；)[^\n.。\d]{0,12}\d", re.IGNORECASE
)
_SUM = re.compile(
    r"[ \t]*(?P<sum>[-+(]*\d[\d.\s()+\-*/×÷·]*?)[ \t]*=[ \t]*(?P<result>[-+]?\d+(?:\.\d+)?)(?![\d.]*\d)(?!\s*[-+*/×÷=%]\s*\d)"
)
_ROUNDING = 0.051
_MOST_SUM = 200


@dataclass(frozen=True, slots=True)
class Value:
    """A number that was read, or the doubt about it."""

    number: float
    end: int
    """Where the text goes on behind it."""
    of: float | None = None
    """The upper end of the scale that the answer names."""
    doubt: str = ""
    has_unit: bool = False
    is_stars: bool = False


def read_value(text: str, at: int = 0) -> Value | None:
    """The number that begins at a place, behind opening quotes and brackets; None where there is none."""
    if (summed := _read_sum(text, at)) is not None:
        return summed
    found = _VALUE.match(text, at)
    if found is None:
        return None
    number, end = number_of(found["number"]), found.end()
    if number is None:
        return None
    doubt = "it is hedged" if found["hedge"] else ""
    if "," in found["number"] and not re.fullmatch(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", found["number"]):
        doubt = "a comma is in it"
    is_word = not any(char.isdigit() for char in found["number"])
    of, is_stars, has_unit = None, False, False
    if (share := _PERCENT.match(text, end)) is not None:
        of, end = 100.0, share.end()
    elif (slash := _OF.match(text, end)) is not None and number_of(slash["of"]) is not None:
        of, end, has_unit = number_of(slash["of"]), slash.end(), True
    elif (unit := _UNITS.match(text, end)) is not None:
        end, has_unit, is_stars = unit.end(), True, bool(unit["stars"])
    if not is_word and _COUNTED.match(text, end):
        return None
    if not doubt and (_SEVERAL.match(text, end) or _FOR_EACH.match(text, end)):
        doubt = "it is a range, or one of several numbers"
    return Value(number, end, of, doubt, has_unit, is_stars)


def number_of(text: str) -> float | None:
    """Digits or number words as a number."""
    plain = text.strip().replace(",", "")
    try:
        return float(plain)
    except ValueError:
        return english_value(plain) if plain.isascii() else chinese_value(plain)


def _read_sum(text: str, at: int) -> Value | None:
    """`3.5 + 4.0 = 7.5` as 7.5; in doubt where the sum is another number."""
    found = _SUM.match(text, at)
    if found is None or not re.search(r"\d\s*[-+*/×÷·)]", found["sum"]):
        return None
    if re.fullmatch(r"\s*\d+(?:\.\d+)?\s*/\s*\d+(?:\.\d+)?\s*", found["sum"]):
        return Value(float(found["result"]), found.end(), doubt="a fraction is given as another number")
    result, computed = float(found["result"]), evaluate(found["sum"])
    is_right = computed is not None and abs(computed - result) <= _ROUNDING
    of = _OF.match(text, found.end())
    most = number_of(of["of"]) if of else None
    return Value(result, of.end() if of else found.end(), most, "" if is_right else "its sum is another number")


_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def evaluate(text: str) -> float | None:
    """The value of a small sum of numbers with + - * / and brackets; None if it is none."""
    if len(text) > _MOST_SUM:
        return None
    try:
        tree = ast.parse(text.strip().replace("×", "*").replace("÷", "/").replace("·", "*"), mode="eval")
        return _evaluated(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _evaluated(node.operand)
        return value if isinstance(node.op, ast.UAdd) else -value
    raise ValueError("not a sum")
