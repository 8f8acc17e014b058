"""The terminal of the README as SVG: `python docs/pictures/terminal.py` types the commands and draws what they print."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from html import escape
from pathlib import Path

from truebatch.cli.app import run

FILE = Path(__file__).parent / "verify.svg"
EXAMPLE = Path(__file__).parents[2] / "examples/silent_fault/classifier.py"
COMMANDS = ("verify classifier.py:system --quick", "verify classifier.py:system --quick --set mended=true")
TOLD = ("BROKEN", "EQUAL", "first difference", "likely cause", "  do:", "covered")
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
}


def typed(command: str) -> list[str]:
    """What a command prints, in its own words, without the arrangements after the third."""
    held = io.StringIO()
    with redirect_stdout(held):
        run([word.replace("classifier.py", str(EXAMPLE)) for word in command.split()])
    lines = held.getvalue().replace(f"{EXAMPLE.parent}/", "").splitlines()
    arrangements = [line for line in lines if re.match(r"  [x=]  ", line)]
    more = len(arrangements) - ARRANGEMENTS
    shown = [*arrangements[:ARRANGEMENTS], *([f"  ... and {more} more arrangements"] if more else [])]
    told = [line for line in lines if line.startswith(TOLD)]
    return [f"$ truebatch {command}", told[0], *shown, *told[1:]]


def wrapped(line: str) -> list[str]:
    """A long line in pieces that end at a space."""
    if len(line) <= COLUMNS:
        return [line]
    at = line.rfind(" ", 0, COLUMNS)
    return [line[:at], *wrapped("    " + line[at + 1 :])]


def draw(lines: Sequence[str]) -> str:
    """The picture of a dark terminal with these lines."""
    pieces = [(piece, colour) for line in lines for colour in [colour_of(line)] for piece in wrapped(line)]
    width, height = 2 * MARGIN + int(COLUMNS * SIZE * 0.605), 2 * MARGIN + len(pieces) * LEADING
    rows = "\n".join(_text(at, text, colour) for at, (text, colour) in enumerate(pieces))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="{SIZE}">\n'
        f"<title>truebatch verify names the module that changes a model's results in batches</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>\n{rows}\n</svg>\n'
    )


def _text(at: int, text: str, colour: str) -> str:
    place = f'x="{MARGIN}" y="{MARGIN + (at + 0.75) * LEADING:.0f}"'
    return f'<text {place} fill="{colour}" xml:space="preserve">{escape(text, quote=False)}</text>'


PLAIN = "#9198a1"


def colour_of(line: str) -> str:
    """By the first word."""
    return (
        COLOURS.get(line.partition(" ")[0] if not line.startswith(" ") else line.split()[0], PLAIN) if line else PLAIN
    )


def all_lines() -> list[str]:
    """Both commands with what they print."""
    return [line for at, command in enumerate(COMMANDS) for line in ([""] if at else []) + typed(command)]


if __name__ == "__main__":
    FILE.write_text(draw(all_lines()), encoding="utf-8")
