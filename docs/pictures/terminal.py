"""The terminal of the README as SVG, in English and Chinese: `python docs/pictures/terminal.py` types the commands and
draws what they print."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from html import escape
from pathlib import Path

from rich.cells import cell_len

from truebatch.cli.app import run

FILES = {"en": Path(__file__).parent / "verify.svg", "zh": Path(__file__).parent / "verify.zh-CN.svg"}
EXAMPLE = Path(__file__).parents[2] / "examples/silent_fault/classifier.py"
COMMANDS = ("verify classifier.py:system --quick", "verify classifier.py:system --quick --set mended=true")
TOLD = (
    "BROKEN", "EQUAL", "first difference", "likely cause", "  do:", "covered",
    "不成立", "相等", "第一处差异", "可能的原因", "  怎么办", "覆盖范围",
)  # fmt: skip
MORE = {"en": "  ... and {more} more arrangements", "zh": "  …… 还有 {more} 种排法"}
TITLES = {
    "en": "truebatch verify names the module that changes a model's results in batches",
    "zh": "truebatch verify 指出在批次里改变模型结果的模块",
}
"""How the lines begin that are shown; of the arrangements the first three are."""
ARRANGEMENTS, COLUMNS = 3, 112
SIZE, LEADING, MARGIN = 13, 19, 18
COLOURS = {
    "$": "#e6edf3",
    "BROKEN:": "#ff7b72",
    "EQUAL:": "#7ee787",
    "first": "#ffa657",
    "likely": "#ffa657",
    "do:": "#79c0ff",
    "不成立": "#ff7b72",
    "相等": "#7ee787",
    "第一处差异": "#ffa657",
    "可能的原因": "#ffa657",
    "怎么办": "#79c0ff",
}


def typed(command: str, language: str) -> list[str]:
    """What a command prints, in its own words, without the arrangements after the third."""
    held, earlier = io.StringIO(), os.environ.get("TRUEBATCH_LANG")
    os.environ["TRUEBATCH_LANG"] = language
    with redirect_stdout(held):
        run([word.replace("classifier.py", str(EXAMPLE)) for word in command.split()])
    os.environ.pop("TRUEBATCH_LANG")
    os.environ.update({"TRUEBATCH_LANG": earlier} if earlier is not None else {})
    lines = held.getvalue().replace(f"{EXAMPLE.parent}/", "").splitlines()
    arrangements = [line for line in lines if re.match(r"  [x=]  ", line)]
    more = len(arrangements) - ARRANGEMENTS
    shown = [*arrangements[:ARRANGEMENTS], *([MORE[language].format(more=more)] if more else [])]
    told = [line for line in lines if line.startswith(TOLD)]
    return [f"$ truebatch {command}", told[0], *shown, *told[1:]]


def wrapped(line: str) -> list[str]:
    """A long line in pieces that end at a space, or in Chinese after a character."""
    if cell_len(line) <= COLUMNS:
        return [line]
    ends = [
        end
        for end in range(1, len(line))
        if line[end - 1] == " " or (ord(line[end - 1]) > 127 and line[end] not in SIGNS)
    ]
    at = max(end for end in ends if cell_len(line[:end]) <= COLUMNS)
    return [line[:at].rstrip(), *wrapped("    " + line[at:])]


SIGNS = "，。；：、）"


def draw(lines: Sequence[str], language: str = "en") -> str:
    """The picture of a dark terminal with these lines."""
    pieces = [(piece, colour) for line in lines for colour in [colour_of(line)] for piece in wrapped(line)]
    width, height = 2 * MARGIN + int(COLUMNS * SIZE * 0.605), 2 * MARGIN + len(pieces) * LEADING
    rows = "\n".join(_text(at, text, colour) for at, (text, colour) in enumerate(pieces))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="Menlo, Consolas, DejaVu Sans Mono, Noto Sans Mono CJK SC, monospace" font-size="{SIZE}">\n'
        f"<title>{TITLES[language]}</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>\n{rows}\n</svg>\n'
    )


def _text(at: int, text: str, colour: str) -> str:
    place = f'x="{MARGIN}" y="{MARGIN + (at + 0.75) * LEADING:.0f}"'
    return f'<text {place} fill="{colour}" xml:space="preserve">{escape(text, quote=False)}</text>'


PLAIN = "#9198a1"


def colour_of(line: str) -> str:
    """By how it begins."""
    return next((colour for word, colour in COLOURS.items() if line.lstrip().startswith(word)), PLAIN)


def all_lines(language: str = "en") -> list[str]:
    """Both commands with what they print."""
    return [line for at, command in enumerate(COMMANDS) for line in ([""] if at else []) + typed(command, language)]


if __name__ == "__main__":
    for language, file in FILES.items():
        file.write_text(draw(all_lines(language), language), encoding="utf-8")
