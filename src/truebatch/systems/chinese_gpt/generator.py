"""The embedded corpus: Chinese statements and dialogues about a small world, with the lengths of a real small corpus.

facts + templates + names -> a target length is drawn -> of several drafts the one nearest to it -> words -> text

What is held out can be learned: a question that was never asked in these words is about a fact that others tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from truebatch.systems.chinese_gpt.facts import (
    GIVEN,
    KINDS,
    MADE_OF,
    OBJECTS,
    PLACE_HEADS,
    PLACE_TAILS,
    SURNAMES,
    Kind,
)

DRAFTS = 24
NAMES_KNOWN = 3000
"""Names and places the corpus draws from, the first ones far more often (Zipf)."""

_HEAD = 100
_STRIDE = 7919
"""A prime: neighbours in rank share no part of their name."""

Words = list[str]


def _spread(number: int, *parts: Sequence[str]) -> list[str]:
    """The number-th combination of parts, far from the one before it."""
    rest = number * _STRIDE % math.prod(len(part) for part in parts)
    chosen = []
    for part in parts:
        rest, at = divmod(rest, len(part))
        chosen.append(part[at])
    return chosen


@dataclass(frozen=True, slots=True)
class Generated:
    """One text and the words it is made of."""

    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The words end to end."""
        return "".join(self.words)


@dataclass(frozen=True, slots=True)
class _Draw:
    """All random choices of the corpus, in one order."""

    rng: np.random.Generator

    def one(self, choices: Sequence[str]) -> str:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def name(self) -> str:
        surname, first, second = _spread(self._rank(), SURNAMES, GIVEN, GIVEN)
        return f"{surname}{first}{second}"

    def place(self) -> str:
        return "".join(_spread(self._rank(), PLACE_HEADS, PLACE_HEADS, PLACE_TAILS))

    def object(self) -> str:
        return "".join(_spread(self._rank(), MADE_OF, OBJECTS))

    def number(self, low: int, high: int) -> str:
        return str(int(self.rng.integers(low, high)))

    def _rank(self) -> int:
        """Zipf with a flattened head (Mandelbrot): few names are frequent and many occur once."""
        grown = _HEAD * ((NAMES_KNOWN + _HEAD) / _HEAD) ** float(self.rng.random())
        return int(grown - _HEAD)

    def thing(self) -> tuple[Kind, str]:
        kind = KINDS[int(self.rng.integers(len(KINDS)))]
        return kind, self.one(tuple(kind.things))


def make_statements(num: int, *, seed: int = 0) -> list[Generated]:
    """Statements of 7 to 43 tokens (BOS and EOS counted), log-normal around 16."""
    draw = _Draw(np.random.default_rng([seed, 1]))
    targets = np.clip(np.exp(draw.rng.normal(np.log(16.4), 0.38, size=num)), 7, 43)
    return [_nearest(_statement, draw, float(target)) for target in targets]


def make_dialogues(num: int, *, seed: int = 0) -> list[Generated]:
    """Dialogues of 13 to 81 tokens: a fifth short answers around 18, the rest conclusions with points around 54."""
    draw = _Draw(np.random.default_rng([seed, 2]))
    is_short = draw.rng.random(num) < 0.2
    short, long = draw.rng.normal(18, 4, size=num), draw.rng.normal(54, 13, size=num)
    targets = np.clip(np.where(is_short, short, long), 13, 81)
    return [
        _nearest(_short_dialogue if short else _long_dialogue, draw, float(target))
        for short, target in zip(is_short, targets, strict=True)
    ]


def _nearest(make: Callable[[_Draw], Words], draw: _Draw, target: float) -> Generated:
    drafts = [make(draw) for _ in range(DRAFTS)]
    lengths = [abs(len(words) + 2 - target) for words in drafts]
    return Generated(tuple(drafts[lengths.index(min(lengths))]))


def _statement(draw: _Draw) -> Words:
    kind, thing = draw.thing()
    first, second = draw.rng.permutation(len(kind.attributes))[:2]
    forms = (
        "{e} 的 {a} 是 {v}",
        "说到 {e} ， 它 的 {a} 是 {v}",
        "我们 知道 {e} 的 {a} 是 {v}",
        "书 上 说 ， {e} 的 {a} 是 {v}",
    )
    words = [*_opening(draw), *_tell(draw.one(forms), kind, thing, int(first))]
    if draw.chance(0.4):
        words += _tell("， {a} 是 {v}", kind, thing, int(second))
    if draw.chance(0.5):
        words += _closing(draw)
    return [*words, "。"]


def _opening(draw: _Draw) -> Words:
    forms = (
        "{n} 说 ，", "{n} 告诉 {m} ，", "在 {p} ，", "{y} 年 ， {n} 在 {p} 写道 ，", "{n} 和 {m} 在 {p} 学习 时 记下 ，",
        "来自 {p} 的 {n} 认为 ，", "{n} 带 着 {o} 和 {o} 来 到 {p} ，", "{n} 送 给 {m} {o} ，", "在 {p} 卖 {o} 的 {n} 说 ，",
    )  # fmt: skip
    return _names(draw, draw.one(forms)) if draw.chance(0.9) else []


def _closing(draw: _Draw) -> Words:
    forms = (
        "， {n} 记住 了", "， 这 是 {n} 和 {m} 的 发现", "， {n} 从 {p} 带回 了 {o}", "， {c} 个 同学 都 答对 了",
        "， {p} 的 {n} 也 这样 说", "， {n} 换来 {o} 、 {o} 和 {o}",
    )  # fmt: skip
    return _names(draw, draw.one(forms))


def _names(draw: _Draw, form: str) -> Words:
    makers: dict[str, Callable[[], str]] = {
        "{n}": draw.name, "{m}": draw.name, "{p}": draw.place, "{o}": draw.object,
        "{y}": lambda: draw.number(1950, 2030), "{c}": lambda: draw.number(2, 60),
    }  # fmt: skip
    return [makers[word]() if word in makers else word for word in form.split()]


def _tell(form: str, kind: Kind, thing: str, attribute: int) -> Words:
    known = {"{e}": thing, "{a}": kind.attributes[attribute], "{v}": kind.things[thing][attribute]}
    return [word for part in form.split() for word in known.get(part, part).split()]


def _short_dialogue(draw: _Draw) -> Words:
    kind, thing = draw.thing()
    asked = int(draw.rng.integers(len(kind.attributes)))
    forms = (
        "{e} 的 {a} 是 什么 ？",
        "请问 {e} 的 {a} 是 什么 ？",
        "你 知道 {e} 的 {a} 吗 ？",
        "我 想 知道 {e} 的 {a} 。",
    )
    answer = _tell("{e} 的 {a} 是 {v} 。", kind, thing, asked)
    return ["用户", "：", *_tell(draw.one(forms), kind, thing, asked), "助手", "：", *answer]


def _long_dialogue(draw: _Draw) -> Words:
    """A question that says what it wants, so that its answer follows from it: one fact first, points, perhaps advice."""
    kind, thing = draw.thing()
    asked, wants_all, wants_advice = int(draw.rng.integers(len(kind.attributes))), draw.chance(0.6), draw.chance(0.5)
    forms = (
        "{e} 的 {a} 是 什么 ？",
        "请 介绍 {e} 的 {a} 。",
        "关于 {e} ， 它 的 {a} 是 什么 ？",
        "{e} 有 怎样 的 {a} ？",
    )
    question = [*_greeting(draw), *_tell(draw.one(forms), kind, thing, asked)]
    question += ["请", "列出", "所有", "要点", "。"] if wants_all else ["请", "说明", "要点", "。"]
    question += ["再", "给", "点", "建议", "。"] if wants_advice else []
    points = [asked, *(i for i in range(len(kind.attributes)) if i != asked)] if wants_all else [asked]
    answer = ["结论", "：", *_tell("{e} 的 {a} 是 {v} 。", kind, thing, asked), "要点", "："]
    for number, attribute in enumerate(points, start=1):
        answer += ["\n", str(number), ")", *_tell("{a} ： {v}", kind, thing, attribute)]
    answer += ["\n", *kind.advice.split(), "。"] if wants_advice else []
    return ["用户", "：", *question, "助手", "：", *answer]


def _greeting(draw: _Draw) -> Words:
    forms = (
        "你好 ， 我 是 {n} 。", "我 是 {p} 的 {n} ， 带 着 {o} 。", "{n} 老师 好 ！ {m} 送来 {o} 。",
        "我 叫 {n} ， 住 在 {p} 。",
        "{n} 和 {m} 在 {p} 想 请教 一下 。", "我 和 {n} 在 {p} 买 了 {o} 、 {o} 、 {o} 和 {o} 。",
        "{n} 、 {m} 和 我 从 {p} 来 ， 有 {o} 、 {o} 和 {o} 。",
        "{n} 用 {o} 换 了 {m} 的 {o} ， 又 用 {o} 换 了 {p} 的 {o} 和 {o} 。",
    )  # fmt: skip
    return [word for _ in range(1 + draw.chance(0.5)) for word in _names(draw, draw.one(forms))]


def odd_texts() -> list[str]:
    """What corpora really hold beside sentences: for tests of readers, linters and tokenisers."""
    return [
        "好", "", "   ", "A plain ASCII sentence, with 42 words or fewer.", "用AI学习2024年的数据", "今天很开心😀🎉",
        "这里写着<|pad|>和</s>", "重复的一句话。", "重复的一句话。", "很长的句子，" * 80,
    ]  # fmt: skip
