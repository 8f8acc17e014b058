"""What is counted of the form of a poem: lines, their lengths, rhymes."""

import pytest

from benchmarks.systems.poem_forms import count_forms, do_rhyme, group_of, is_regular, lines_of

MOON = "床前明月光，疑是地上霜。\n舉頭望明月，低頭思故鄉。"
READINGS = {"霜": ["shuang"], "鄉": ["xiang"], "月": ["yue"], "光": ["guang"], "行": ["xing", "hang"], "人": ["ren"]}


def readings(character):
    return READINGS.get(character, ["x"])


def test_lines_end_at_marks_and_line_ends():
    assert lines_of(MOON) == ["床前明月光", "疑是地上霜", "舉頭望明月", "低頭思故鄉"]


@pytest.mark.parametrize(
    ("text", "regular"),
    [
        (MOON, True),
        (MOON + "\n" + MOON, True),
        (MOON[:-2] + "。", False),
        (MOON + "\n舉頭望明月。", False),
        ("舉頭望明，" * 4, False),
    ],
)
def test_a_regular_poem_has_four_or_eight_lines_of_five_or_seven(text, regular):
    assert is_regular(text) == regular


@pytest.mark.parametrize(
    ("syllables", "group"),
    [("zhi shi ri zi", "支"), ("wo ge bo", "波"), ("xue jie ye lüe", "皆"), ("hao jiao", "豪"), ("yun wen xin jun", "文"),
     ("xiong dong qing", "庚"), ("qi yu er nü", "齐"), ("wu lu zhu", "姑"), ("yuan shan xian", "寒"), ("gui mei", "微"),
     ("liu gou", "尤"), ("guai", "开"), ("hua jia", "麻"), ("xiang guang", "唐")],
)  # fmt: skip
def test_syllables_have_the_rhymes_of_the_new_rhyme_book(syllables, group):
    assert {group_of(syllable) for syllable in syllables.split()} == {group}


@pytest.mark.parametrize(
    ("ends", "rhymes"), [("霜鄉", True), ("霜行", True), ("霜月", False), ("霜霜", False), ("霜人", False)]
)
def test_lines_at_even_places_share_a_rhyme_in_some_reading_and_are_not_one_word(ends, rhymes):
    lines = ["xxxx月", "xxxx" + ends[0], "xxxx人", "xxxx" + ends[1]]
    assert do_rhyme(lines, readings) == rhymes


def test_shares_are_of_all_texts_and_of_those_in_form():
    found = count_forms([MOON, MOON.replace("鄉", "人"), "床前。"], readings)
    assert found == pytest.approx({"texts": 3, "regular": 2 / 3, "rhyming": 1 / 3, "rhyming_of_regular": 1 / 2})
