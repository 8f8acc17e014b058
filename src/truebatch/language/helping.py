"""`--help` in Chinese: the texts of a tree of commands, and the words its library puts around them."""

from __future__ import annotations

import re
import shutil
from typing import Any

from truebatch.language.translating import in_chinese

EXAMPLES = "Examples:"
AS_IT_IS = "\b\n"
"""Click leaves a paragraph alone that begins so; it counts characters, and a Chinese one is two columns wide."""


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a help text before its examples, each in one line."""
    told = text.partition(EXAMPLES)[0].replace("\b", "")
    joined = (" ".join(part.split()) for part in re.split(r"\n\s*\n", told))
    return [part for part in joined if part]


def translate_help(command: Any) -> None:
    """Put Chinese into a command and all below it: paragraphs, short helps, options; examples are commands and stay."""
    if command.help:
        _, examples, lines = command.help.partition(EXAMPLES)
        told = [AS_IT_IS + "\n".join(_wrapped(in_chinese(part))) for part in paragraphs(command.help)]
        command.help = "\n\n".join([*told, AS_IT_IS + in_chinese(examples) + lines] if examples else told)
    for name in ("short_help", "epilog"):
        if getattr(command, name, None):
            setattr(command, name, in_chinese(getattr(command, name)))
    for param in command.params:
        if getattr(param, "help", None):
            param.help = in_chinese(" ".join(param.help.split()))
    get_help = command.get_help
    command.get_help = lambda context: _headings(get_help(context))
    for inner in getattr(command, "commands", {}).values():
        translate_help(inner)


def chinese_width() -> int:
    """The width, in characters, at which options with Chinese help fit the terminal."""
    return max(40, shutil.get_terminal_size().columns * 5 // 8)


def _wrapped(text: str) -> list[str]:
    width = max(20, shutil.get_terminal_size().columns - 4)
    lines, used = [""], 0
    for piece in re.findall(r"[!-~]+|\s|.", text):
        cells = sum(1 if character.isascii() else 2 for character in piece)
        if used + cells > width and lines[-1].strip():
            lines, used = [*lines, ""], 0
        lines[-1] += piece if lines[-1] or not piece.isspace() else ""
        used += cells
    return [line.rstrip() for line in lines]


def _headings(text: str) -> str:
    """The words of click and typer: headings, and what stands in brackets behind an option."""
    said = in_chinese(text)
    return re.sub(r"\[(default|required)(?=[:;\]])", lambda found: f"[{in_chinese(found[1])}", said)
