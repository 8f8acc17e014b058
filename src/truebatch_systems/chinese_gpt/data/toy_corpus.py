"""The small world of the embedded corpus: things of several kinds and what is true of each.

One line a thing: its name, then the value of each attribute of its kind. Blanks separate words inside a value, so that
the corpus knows its own words.

The embedded corpus: Chinese statements and dialogues about a small world, with the lengths of a real small corpus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Kind:
    """Things that have the same attributes."""

    name: str
    attributes: tuple[str, ...]
    things: dict[str, tuple[str, ...]]
    """Thing -> the value of every attribute."""
    advice: str
    """A sentence that is said of every thing of this kind."""


def _kind(name: str, attributes: str, advice: str, lines: str) -> Kind:
    rows = [line.split("，") for line in lines.strip().splitlines()]
    return Kind(name, tuple(attributes.split("，")), {row[0]: tuple(row[1:]) for row in rows}, advice)


KINDS = (
    _kind("省份", "省会，位置，名胜", "建议 先 看 地图 ， 再 安排 行程", """
四川，成都，西南 地区，都江堰
陕西，西安，西北 地区，兵马俑
浙江，杭州，东部 沿海，西湖
江苏，南京，长江 下游，拙政园
湖北，武汉，长江 中游，黄鹤楼
湖南，长沙，洞庭湖 以南，岳麓山
广东，广州，南部 沿海，丹霞山
山东，济南，黄河 下游，泰山
山西，太原，黄土 高原，云冈 石窟
河南，郑州，中原 地区，少林寺
河北，石家庄，华北 平原，避暑 山庄
云南，昆明，西南 边境，玉龙 雪山
"""),
    _kind("国家", "首都，所在 大洲，标志 建筑", "建议 先 了解 当地 的 文化 和 习惯", """
法国，巴黎，欧洲 西部，埃菲尔 铁塔
英国，伦敦，欧洲 西北部，大本钟
德国，柏林，欧洲 中部，勃兰登堡 门
意大利，罗马，欧洲 南部，比萨 斜塔
俄罗斯，莫斯科，欧洲 和 亚洲，红场 教堂
日本，东京，亚洲 东部，东京 铁塔
韩国，首尔，亚洲 东北部，景福宫
印度，新德里，亚洲 南部，泰姬陵
泰国，曼谷，东南亚，大皇宫
埃及，开罗，非洲 北部，金字塔
"""),
    _kind("动物", "类别，主要 食物，生活 环境", "建议 保持 距离 ， 不要 打扰 它们", """
大熊猫，哺乳 动物，竹子，高山 竹林
东北虎，大型 猫科 动物，野猪 和 鹿，寒冷 的 森林
长颈鹿，最高 的 动物，高处 的 树叶，热带 草原
企鹅，不会 飞 的 鸟，磷虾 和 小鱼，南极 冰原
丹顶鹤，大型 涉禽，鱼虾 和 草籽，湿地 沼泽
啄木鸟，森林 益鸟，树干 里 的 虫，山地 森林
眼镜蛇，有毒 的 蛇，青蛙 和 老鼠，温暖 的 丘陵
乌龟，爬行 动物，水草 和 小虾，池塘 河流
青蛙，两栖 动物，蚊子 和 害虫，稻田 水边
金鱼，观赏 鱼类，鱼虫 和 饲料，清水 鱼缸
"""),
    _kind("水果", "颜色，成熟 季节，味道", "建议 洗净 之后 再 吃 ， 每天 适量", """
苹果，红色，秋天，脆甜
香蕉，黄色，全年，软糯
西瓜，绿皮 红瓤，盛夏，多汁 清甜
葡萄，紫色，夏末，酸甜
草莓，鲜红，春天，香甜
橘子，橙色，初冬，酸甜 多汁
柠檬，亮黄，冬春，很 酸
樱桃，深红，初夏，甜 而 微酸
芒果，金黄，夏天，浓香
猕猴桃，褐皮 绿心，深秋，先 酸 后 甜
"""),
    _kind("职业", "工作 地点，主要 任务，必要 工具", "建议 从 基本功 开始 ， 慢慢 积累", """
医生，医院，治疗 病人，听诊器
教师，学校，教育 学生，课本 和 粉笔
农民，田野，种植 庄稼，锄头
厨师，厨房，烹饪 菜肴，锅铲
消防员，消防站，扑灭 大火，水枪
警察，派出所，维护 治安，对讲机
飞行员，驾驶舱，驾驶 飞机，仪表
画家，画室，创作 图画，画笔
木匠，作坊，制作 家具，锯子
渔民，渔船，捕捞 海鱼，渔网
"""),
    _kind("节日", "日期，传统 食品，主要 活动", "建议 提前 准备 ， 和 家人 一起 过", """
春节，正月 初一，饺子，拜年 放 鞭炮
元宵节，正月 十五，汤圆，赏 花灯
清明节，四月 五日 前后，青团，扫墓 踏青
端午节，五月 初五，粽子，赛 龙舟
七夕节，七月 初七，巧果，乞巧 许愿
中秋节，八月 十五，月饼，赏月 团圆
重阳节，九月 初九，重阳糕，登高 敬老
腊八节，腊月 初八，腊八粥，祭祖 祈福
冬至节，十二月 下旬，羊肉汤，数九 消寒
元旦，一月 一日，年糕，迎接 新年
"""),
    _kind("元素", "元素 符号，常温 状态，常见 用途", "建议 在 老师 指导 下 做 实验", """
氢，H，无色 气体，清洁 燃料
氧，O，支持 燃烧 的 气体，帮助 呼吸
碳，C，黑色 固体，制作 铅笔芯
铁，Fe，坚硬 金属，建造 桥梁
铜，Cu，紫红 金属，制造 电线
铝，Al，轻 的 金属，制造 易拉罐
金，Au，黄色 金属，制作 首饰
银，Ag，白亮 金属，制作 餐具
汞，Hg，液态 金属，制作 温度计
钠，Na，柔软 金属，制造 路灯
"""),
    _kind("乐器", "类型，演奏 方法，音色", "建议 每天 坚持 练习 半 小时", """
二胡，弓弦 乐器，用 弓 拉，柔美
琵琶，弹拨 乐器，用 手指 弹，清脆
古筝，古老 弹拨 乐器，用 义甲 拨，悠扬
笛子，竹制 管乐器，横 着 吹，明亮
唢呐，双簧 管乐器，竖 着 吹，高亢
钢琴，键盘 乐器，按 琴键，宽广
小提琴，西洋 弦乐器，夹 着 拉，优美
吉他，六弦 乐器，拨动 琴弦，温暖
大鼓，打击 乐器，用 鼓槌 敲，雄壮
口琴，小型 簧片 乐器，含 着 吹吸，轻快
"""),
)  # fmt: skip

SURNAMES = "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯于董萧程曹袁邓许傅沈曾彭吕苏卢蒋蔡贾丁魏薛叶阎"
GIVEN = "伟芳娜敏静丽强磊军洋勇艳杰娟涛明超秀霞平刚桂英华玉兰文建国志海云春梅雪飞龙凤天宇思佳子涵浩然欣怡晨曦雨泽"
PLACE_HEADS = "青白红黑金银铜石沙柳松竹梅桃杏桂枫槐云雾雨雪风雷东南西北上下大小长平安永福新老高"
PLACE_TAILS = ("山村", "河镇", "湖湾", "桥头", "岭口", "沟里", "泉乡", "塘边", "寨子", "渡口", "城关", "坡地")
MADE_OF = "木竹铁铜银金玉石瓷陶布丝棉毛皮纸蜡冰雪泥沙草花茶果药酒油盐糖豆米麦鱼虾牛羊红白黑蓝绿旧新大小长圆方"
OBJECTS = (
    "盒篮椅桌柜床灯扇伞帽鞋袋瓶碗盘杯勺刀剑弓箭鼓琴笛书画笔墨砚印章珠链环镜梳针线绳网车船轮桨旗牌门窗墙瓦砖梯锁钟铃球棋"
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
