"""What the prose of an answer claims the score to be: behind a label, behind a verb, alone on a line, or as a share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from truebatch.scoring.readouts.answer_value import HEDGE, NUMBER, Value, read_value

_SHOWN = 60
_MOST = 200
"""Claims of one kind that are looked at."""
FINAL, STATED, WEAK = 3, 2, 1
"""How strongly a number is marked as the score: as the final one; as the score; as that of a part, or as a share."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A place that says what the score is."""

    strength: int
    value: Value | None
    """None: the place has no number, as in `Score: N/A`."""
    at: int
    name: str = ""
    """What the number is said to be of, where that is not the whole."""
    is_closed: bool = False
    """True if nothing that follows could make it another number."""
    is_dashed: bool = False
    """A dash stands before the number: a separator, or a minus."""


_SCORE_WORD = r"(?:scores?|scored|ratings?|grades?|reward)"
_RESULT_WORD = (
    r"(?:answer|result|verdict|judge?ment|evaluation|assessment|overall|total|average|mean"
    r"|conclusion|final)"
)
_HAN_WORD = r"(?:总?评分|总?得分|总分|总计|总评|打分|分数|分值|给分|均分|平均分|综合分|最终分|成绩|答案|结果)"
LABEL = rf"(?:\b(?:{_SCORE_WORD}|{_RESULT_WORD})\b|{_HAN_WORD}|\[RESULT\])"
FINAL_WORD = re.compile(
    r"\b(?:final(?:ly)?|overall|total|average|mean|aggregate|combined|altogether|revised|adjusted|corrected"
    r"|updated|in (?:sum|conclusion|total))\b"
    r"|最终|总体|综合|整体|总|平均|最后|汇总|修正|调整后|更新",
    re.IGNORECASE,
)
_HINT = (
    r"(?:[ \t]*\([^()\n]{0,40}\)|[ \t]*\[[^\[\]\n\d]{0,20}\]"
    r"|[ \t]+(?:that[ \t]+)?(?:I|we)\b[a-z'’ \t]{1,40}?"
    r"|[ \t]+(?:for|of|to|given to|assigned to)[ \t]+[^\n.:;,\d=|]{1,40}?)?"
)
_IS = (
    r"(?:[ \t]*[\"'”』」】\]]?[ \t]*(?P<sep>(?:为|是)?:+|=+>?|->|\|+|→|–|—|-(?=[ \t])|是|为|\n+)[ \t\n]*"
    r"|[ \t]+(?P<is>is|was|as|of|at|equals|would be|should be|will be|comes to|goes to|stands at)[ \t:]+"
    r"(?:therefore|thus|hence|now|then|simply|a|an)?[ \t]*"
    r"|(?P<bare>[ \t]*[】\]'”]?[ \t]*)(?=[\"'(\[]?[-+.]?\d|[一二三四五六七八九十]))"
)
_LABELLED = re.compile(rf"(?P<label>{LABEL})(?P<hint>{_HINT}){_IS}", re.IGNORECASE)
_VERB = re.compile(
    r"\b(?:rate|rated|rating|gives?|gave|given|giving|say|choose|grade|award|assign|deserves?|earns?|gets?"
    r"|receives?|merits?|score"
    r"|settle on|go with|going with)\b(?P<gap>[^\n.:;!?\d]{0,60}?)[ \t](?:an?[ \t]+|as[ \t]+|at[ \t]+"
    r"|of[ \t]+|with[ \t]+)?"
    r"(?=(?:about |around |roughly |between |[~≈])?[\"'(]*(?:[-+]?\d|(?:one|two|three|four|five|six|seven"
    r"|eight|nine|ten|zero)\b))",
    re.IGNORECASE,
)
_HAN_VERB = re.compile(
    r"(?:打出?|给出?|评为?|得|获得|得到)(?:了|它|其|这张图|该图|此图|这个编辑|到"
    r"|出){0,3}[ \t]*(?=[\d一二三四五六七八九十])"
)
_SHARE = re.compile(
    rf"(?<![\w./,+\-])(?={NUMBER}[ \t]*(?:points?|pts?)?[ \t]*(?:/|out[ \t]+of)[ \t]*\d|(?:one|two|three"
    rf"|four|five|six|seven|eight|nine|ten)[ \t]+out[ \t]+of)",
    re.IGNORECASE,
)
_HAN_POINTS = re.compile(
    r"(?<![扣减加差少多满每各第总基础\d.\-~到至或+])[ \t]*(?=\d+(?:\.\d+)?[ \t]*分(?![钟之辨别米制割布析类散明外数]))"
)
_REVERSED = re.compile(
    rf"(?={NUMBER}[^\n\w]{{0,3}}[ \t]+(?:is|was|would be)[ \t]+(?:my|the|its)[ \t]+(?:final "
    rf"|overall )?(?:score|rating|grade)\b)",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}|\[\[([^\[\]]*)\]\]")
_LINE = re.compile(r"^[ \t]*(?:[-•>][ \t]+)?(?P<value>.+?)[ \t]*$", re.MULTILINE)
_LISTED = re.compile(r"^\s*\d+\s*[.)、．]\s+\S", re.MULTILINE)
_RUBRIC = re.compile(
    r"[\s\"')]*(?:分)?[ \t]*(?:means?|indicat\w+|represents?|denotes?|corresponds?|stands? for|if|when|where"
    r"|would (?:mean|require|be)"
    r"|is (?:for|reserved|given|perfect|best|the (?:best|worst|max\w*|min\w*|highest|lowest))|being"
    r"|requires?|表示|代表|意味|为满分|是满分)",
    re.IGNORECASE,
)
_FOLLOWS = re.compile(
    r"[\"'”’」】)\]}\s]*(?:$|[.,;:!?。，；：！？、()（）\[\]|<>#—–\-]|\n|(?:because|since|for|on|as|due"
    r"|overall|given|in|from|with|but|and"
    r"|based|though|although|which|reflecting|considering|points?|pts|stars?|so|while|to (?:this|the|it)|at"
    r"|owing|thanks|，|因)\b|[\u4e00-\u9fff])",
    re.IGNORECASE,
)
_NOT = re.compile(
    r"\b(?:not|never|cannot|can't|\w+n't|rather than|instead of|nor|hardly|neither|if|unless|could|might|may"
    r"|compared (?:to|with)"
    r"|e\.g|such as|example|maximum|possible)\b|不是|不能|不会|没有|并非|无法|如果|例如|比如|而不",
    re.IGNORECASE,
)
_IF = re.compile(r"\b(?:if|unless|were|had (?:it|the)|would have)\b|如果(?!\s*[，,的])|假如|要是|倘若", re.IGNORECASE)
_WITHOUT = re.compile(r"[ \t,]*(?:without|if|unless|but for|were|had)\b", re.IGNORECASE)
_LIMIT = re.compile(
    rf"{HEDGE}[ \t]*(?:an? )?$|(?:至少|至多|最多|最少|不超过|不低于|不到|超过)[^，。\d]{{0,6}}$", re.IGNORECASE
)
_OTHER = re.compile(
    r"\b(?:preliminary|initial|tentative|provisional|expected|previous|prior|former|human|reference|baseline"
    r"|original|source|raw"
    r"|max(?:imum)?|min(?:imum)?|highest|lowest|possible|threshold|target|before|input|old)\b|初始|原图|原始"
    r"|参考|预期|最高|最低|基础|阈值|之前",
    re.IGNORECASE,
)
_COUNTER = re.compile(
    r"(?:\b(?:on|since|until|dated|step|page|image|figure|part|round|stage|epoch|version|item|question|case"
    r"|sample|try|attempt|no\.)"
    r"|第|步骤|图)[ \t:#]*[\[(]?$",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r"(?:confidence|certainty|certain|sure|difficulty|probability|likelihood|信心|置信度?|把握|难度"
    r"|概率)[^\n]{0,12}$",
    re.IGNORECASE,
)
_NEUTRAL_WORDS = (
    "the|a|an|my|our|your|this|that|these|its|it|his|her|image|images|picture|photo|edit|edited|editing|"
    "output|result|so|thus|therefore|hence|and|is|final|finally|overall|total|average|mean|given|assigned|"
    "numeric|numerical|reward|judge|evaluation|suggested|recommended|as|in|on|at|of|for|to|with|be|i|we|"
    "would|give|conclude|conclude|believe|think|say|assign|rate|based|above|all|analysis|here|now|then|"
    "rating|score|scores|grade|aggregate|combined|conclusion|s|following|assessment|single|proposed|"
    "resulting|revised|adjusted|corrected|updated|award|summary|sum|step|points|point|out|number|value"
)
_NEUTRAL = frozenset(_NEUTRAL_WORDS.split("|"))
_HAN_NEUTRAL = re.compile(
    "最终|最后|总体|综合|整体|总|平均|我|的|会|该|这|张|个|本|此|图像|图片|图|照片|编辑后|编辑|结果|因此|所以|故|给出|给|评|打|为|是|根据|以上|分析|可以|它|其|对|请|下|如|制|十分|百分|五分"
)
_CLAUSE = re.compile(r"[.!?;。！？；，,：:\n|、】\]]")


def prose_claims(text: str) -> Iterator[Claim]:
    """Every claim in a text that `plain_markup` has made plain."""
    ends: set[int] = set()
    for claims in (_boxed, _labelled, _verbs, _bare_lines, _shares):
        for claim in islice(claims(text), _MOST):
            end = claim.value.end if claim.value is not None else 0
            if end not in ends or claim.strength > WEAK:  # a share behind a label is not a second claim
                yield claim
            ends |= {end} if end else set()


def _boxed(text: str) -> Iterator[Claim]:
    for match in _BOXED.finditer(text):
        inner = (match[1] or match[2] or "").strip()
        yield Claim(FINAL, whole_value(inner), match.start(), is_closed=True)


def whole_value(text: str) -> Value | None:
    """The value of a text that is nothing else."""
    plain = text.strip().strip("\"'“”").removesuffix("。")
    value = read_value(plain)
    if value is None or value.doubt:
        return value
    return value if not re.sub(r"[\s.\"')\]]", "", plain[value.end :]) else None


def _labelled(text: str) -> Iterator[Claim]:
    for match in _LABELLED.finditer(text):
        before = _clause(text, match.start("label"))
        label, hint = match["label"], match["hint"] or ""
        if match["bare"] is not None and not re.fullmatch(
            rf"{_SCORE_WORD}|overall|{_HAN_WORD}|\[RESULT\]", label, re.IGNORECASE
        ):
            continue
        value = read_value(text, match.end())
        if value is None:
            if match["sep"] in (":", "=", "|") and _says_none(text, match.end()):
                yield Claim(STATED, None, match.start())
            continue
        if _RUBRIC.match(text, value.end) or _NOT.search(before) or _is_supposed(text, match.start(), value.end):
            continue
        is_strong = match["sep"] is not None and re.fullmatch(
            rf"{_SCORE_WORD}|{_HAN_WORD}|\[RESULT\]", label, re.IGNORECASE
        )
        if match["bare"] is not None and text[value.end : value.end + 1] == ":":
            continue
        if not value.doubt and not is_strong and not _FOLLOWS.match(text, value.end):
            continue
        name = _name(before, hint)
        if name and _OTHER.search(name):
            value = replace(value, doubt="it is the score of something else")
        is_final = FINAL_WORD.search(f"{before} {label}") or _is_under_final(text, match.start()) or label == "[RESULT]"
        strength = WEAK if name else FINAL if is_final else STATED
        is_closed = _is_closed(text, match.start(), value, is_final=bool(is_final))
        yield Claim(strength, value, match.start(), name, is_closed, match["sep"] in ("-", "–", "—"))


def _says_none(text: str, at: int) -> bool:
    """Whether a label is followed by words that refuse a number."""
    return re.match(
        r"[\s\"'(\[]*(?:n/?a\b|none\b|null\b|nan\b|unknown|undefined|not (?:applicable|available|possible)"
        r"|cannot|can't|unable|tbd|\?|无|不适用|未知|不能|无法)",
        text[at:], re.IGNORECASE,
    ) is not None  # fmt: skip


def _name(before: str, hint: str) -> str:
    """What the label is of, if that is not the whole: `Colour` in `Colour score`, `the light` in `Score for the light`."""
    plain = re.sub(r"\([^()]*\d[^()]*\)|\bI\b.*|\bwe\b.*", " ", hint)
    words = re.findall(r"[A-Za-z]+", f"{before} {plain}")
    left = [word for word in words if word.lower() not in _NEUTRAL and word != "RESULT"]
    han = _HAN_NEUTRAL.sub("", "".join(re.findall(r"[\u4e00-\u9fff]", f"{before}{plain}")))
    return " ".join([*left, *([han] if han else [])])


def _clause(text: str, at: int) -> str:
    """The words before a place, back to the last mark."""
    start = max(0, at - 60)
    before = re.sub(r"^\s*\d+\s*[.)、]\s*", "", text[start:at])
    return _CLAUSE.split(before)[-1]


def _is_under_final(text: str, at: int) -> bool:
    """Whether the last line above, a short one, is the heading of the whole."""
    above = [line.strip() for line in text[max(0, at - 200) : at].split("\n")[:-1] if line.strip()]
    return (
        bool(above) and len(above[-1]) <= 30 and bool(FINAL_WORD.search(above[-1])) and not re.search(r"\d", above[-1])
    )


def _is_supposed(text: str, start: int, end: int) -> bool:
    """Whether a number is given under a condition: `if the light were right, 9/10`, `9/10 without the noise`."""
    sentence = re.split(r"[.!?;。！？；\n]", text[max(0, start - 200) : start])[-1]
    return bool(_IF.search(sentence) or _WITHOUT.match(text, end))


def _is_closed(text: str, at: int, value: Value, *, is_final: bool) -> bool:
    """Whether the line of a label has ended with its value, and is the first line or that of the final score."""
    is_ended = re.match(r"[\s\"')\]]*[.。;；]?[ \t]*\n", text[value.end :]) is not None
    return is_ended and (is_final or not text[:at].strip())


def _verbs(text: str) -> Iterator[Claim]:
    for match in _VERB.finditer(text):
        before = _clause(text, match.end())
        value = read_value(text, match.end())
        if value is None or _RUBRIC.match(text, value.end) or _NOT.search(before):
            continue
        if _LIMIT.search(text[max(0, match.end() - 30) : match.end()]) or _is_supposed(text, match.start(), value.end):
            continue
        if not value.doubt and not (value.of is not None or _FOLLOWS.match(text, value.end)):
            continue
        if value.of is not None and not _FOLLOWS.match(text, value.end):
            continue
        strength = (
            FINAL if FINAL_WORD.search(text[max(0, match.start() - 40) : match.end()].split("\n")[-1]) else STATED
        )
        yield Claim(strength, value, match.start())
    for match in _HAN_VERB.finditer(text):
        value = read_value(text, match.end())
        if value is None or not (value.has_unit or value.of) or _NOT.search(_clause(text, match.start())):
            continue
        if _LIMIT.search(text[max(0, match.start() - 12) : match.start()]) or _is_supposed(
            text, match.start(), value.end
        ):
            continue
        yield Claim(STATED, value, match.start(), _name(_clause(text, match.start()), ""))


def _bare_lines(text: str) -> Iterator[Claim]:
    is_list = _LISTED.search(text) is not None
    for match in _LINE.finditer(text):
        line = match["value"].strip()
        if is_list and re.fullmatch(r"\d+[.)、]?", line) and line[-1:] in ".)、":
            continue
        value = whole_value(line)
        if value is not None:
            is_closed = not text[: match.start()].strip() and match.end() < len(text)
            is_dashed = match[0].lstrip().startswith("- ")
            yield Claim(STATED, value, match.start("value"), is_closed=is_closed, is_dashed=is_dashed)
    for match in _REVERSED.finditer(text):
        if (value := read_value(text, match.end())) is not None and not _NOT.search(_clause(text, match.start())):
            yield Claim(STATED, value, match.start())


def _shares(text: str) -> Iterator[Claim]:
    """Numbers that are marked by their own scale alone: 8/10, 8 out of 10, 8分."""
    for match in [*_SHARE.finditer(text), *_HAN_POINTS.finditer(text)]:
        before, value = _clause(text, match.end()), read_value(text, match.end())
        line = text[max(0, match.end() - _SHOWN) : match.end()].split("\n")[-1]
        if value is None or any(rule.search(line) for rule in (_COUNTER, _ASIDE, _LIMIT)) or _NOT.search(before):
            continue
        if _RUBRIC.match(text, value.end) or not _FOLLOWS.match(text, value.end):
            continue
        if _is_supposed(text, match.start(), value.end):
            continue
        yield Claim(WEAK, value, match.start(), line.strip())
