"""Tang poems of a regular form, from the npm package chinese-poetry: python -m tests.real.poems

Four or eight lines, all of five or all of seven characters; each once, as {"text": ...} in `.real/poems.jsonl`.
"""

import json
import re
import sys

from tests.real.archives import FOLDER, open_npm

FILE = FOLDER / "poems.jsonl"
HAN = "\u3400-\u9fff"
PARTS = re.compile(f"[^{HAN}]+")


def is_regular(text):
    """Lines of one length, five or seven, four or eight of them, and nothing but characters and the ends of lines."""
    lines = [line for line in PARTS.split(text) if line]
    is_clean = re.fullmatch(f"[{HAN}，。！？；\n]+", text) is not None
    return is_clean and len(lines) in (4, 8) and {len(line) for line in lines} in ({5}, {7})


def tang_poems():
    """All of them, in the order of the package, one line of text for each couplet."""
    with open_npm("chinese-poetry-2.0.1.tgz") as files:
        wanted = [m for m in files.getmembers() if "/quantangshi/poet.tang." in m.name and m.name.endswith(".json")]
        for member in sorted(wanted, key=lambda member: int(member.name.split(".")[-2])):
            yield from ("\n".join(poem["paragraphs"]) for poem in json.load(files.extractfile(member)))


def write_poems():
    """The file, written once."""
    if not FILE.is_file():
        poems = dict.fromkeys(poem for poem in tang_poems() if is_regular(poem))
        lines = [json.dumps({"text": poem}, ensure_ascii=False) + "\n" for poem in poems]
        part = FILE.with_suffix(".part")
        part.write_text("".join(lines), encoding="utf-8")
        part.rename(FILE)
        sys.stdout.write(f"{FILE.name}: {len(lines):,} poems\n")
    return FILE


if __name__ == "__main__":
    write_poems()
