"""`--help` in Chinese: the texts of a tree of commands, and pages that count columns, two for a Chinese character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from truebatch.language.translate import in_chinese

EXAMPLES = "Examples:"
_PIECE = re.compile(r"[（“《「]*(?:[!-~]+|[^\s])[，。：；、）”》」？！…]*|\s+")
"""What stands on one line: a word, or one character, with the signs that may not begin or end a line."""
_IN_BRACKETS = re.compile(r"\[(default|required)(?=[:;\]])")


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a help text before its examples, each in one line."""
    told = text.partition(EXAMPLES)[0].replace("\b", "")
    joined = (" ".join(part.split()) for part in re.split(r"\n\s*\n", told))
    return [part for part in joined if part]


def translate_help(command: Any) -> None:
    """Put Chinese into a command and all below it: paragraphs, short helps, options; examples are commands and stay."""
    if command.help:
        _, examples, lines = command.help.partition(EXAMPLES)
        told = [in_chinese(part) for part in paragraphs(command.help)]
        command.help = "\n\n".join([*told, in_chinese(examples) + lines] if examples else told)
    for name in ("short_help", "epilog"):
        if getattr(command, name, None):
            setattr(command, name, in_chinese(getattr(command, name)))
    for param in command.params:
        if getattr(param, "help", None):
            param.help = in_chinese(" ".join(param.help.split()))
    command.get_help = lambda context: _page(command, context)
    for inner in getattr(command, "commands", {}).values():
        translate_help(inner)


def columns(text: str) -> int:
    """The columns of a terminal that a text takes.

    >>> columns("abc 中文")
    8
    """
    return sum(1 if character.isascii() else 2 for character in text)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; between Chinese characters one may end, before a comma it may not.

    >>> wrapped("一步能放多少样本，就放 samples 个。", 16)
    ['一步能放多少样', '本，就放 samples', '个。']
    """
    lines = [""]
    for piece in _PIECE.findall(text):
        if columns(lines[-1] + piece.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece if lines[-1] or not piece.isspace() else ""
    return [line.rstrip() for line in lines]


def _page(command: Any, context: Any) -> str:
    plain = context.make_formatter()
    kind: Any = type(plain)
    page = _pages(kind)(width=plain.width)
    command.format_help(context, page)
    return str(page.getvalue()).rstrip("\n")


@cache
def _pages(plain: Any) -> Any:
    """The pages of the command line's library, which count characters, as pages that count columns."""

    class Pages(plain):  # type: ignore[misc]
        def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
            start = in_chinese(f"Usage: {prog}") + " "
            self._write_lines(start, wrapped(args, self.width - columns(start)), columns(start))

        def write_heading(self, heading: str) -> None:
            self.write(" " * self.current_indent + in_chinese(f"{heading}:") + "\n")

        def write_text(self, text: str) -> None:
            told = [_paragraph(part, self.width - self.current_indent) for part in re.split(r"\n\s*\n", text)]
            lines = [line for part in told for line in (*part, "")][:-1]
            self.write("".join((" " * self.current_indent + line).rstrip() + "\n" for line in lines))

        def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
            first = min(max(columns(name) for name, _ in rows), col_max) + col_spacing
            for name, text in rows:
                start = " " * self.current_indent + name
                at = first + self.current_indent
                start += " " * (at - columns(start)) if columns(name) <= first - col_spacing else "\n" + " " * at
                self._write_lines(start, wrapped(_described(text), max(self.width - at, 10)), at)

        def _write_lines(self, start: str, lines: Sequence[str], indent: int) -> None:
            self.write((start + ("\n" + " " * indent).join(lines)).rstrip() + "\n")

    return Pages


def _paragraph(text: str, width: int) -> list[str]:
    """The lines of one paragraph. An indented one is a command: where it is too long it continues after a backslash."""
    indent = " " * (len(text.lstrip("\n")) - len(text.lstrip()))
    if not indent:
        return wrapped(" ".join(text.split("\n")), width)
    lines = wrapped(" ".join(text.split()), width - len(indent) - len(" \\"))
    return [indent + ("  " if i else "") + line + (" \\" if i < len(lines) - 1 else "") for i, line in enumerate(lines)]


def _described(text: str) -> str:
    """The text after an option: its help is Chinese already, the words of the library are not."""
    said = in_chinese(text) if text.isascii() else text
    return _IN_BRACKETS.sub(lambda found: f"[{in_chinese(found[1])}", said)
