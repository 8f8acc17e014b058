"""An answer as plain text: full-width digits, markdown, tables, tags and thoughts are undone, line breaks stay."""

from __future__ import annotations

import html
import re
import unicodedata

_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning|scratchpad)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_OPEN_THOUGHT = re.compile(r"<(think|thinking|thought|scratchpad)>(?!.*</\1>).*", re.DOTALL | re.IGNORECASE)
_HALVES = {"½": ".5", "¼": ".25", "¾": ".75"}
_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\ufe0e\ufe0f\u20e3]")
_RAISED = re.compile("(?<=[0-9])[\u00b2\u00b3\u00b9\u2070-\u2089]+")
_STRUCK = re.compile(r"~~[^~\n]*~~")
_TAG = re.compile(r"</?[A-Za-z][^<>\n]{0,80}>")
_BREAK = re.compile(r"<br\s*/?>|</p>|</li>|</div>", re.IGNORECASE)
_LATEX = re.compile(r"\\(?:text|mathbf|textbf|mathrm)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\d?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_RULE = re.compile(r"\s*\|?(?:\s*:?-{2,}:?\s*\|?)+\s*")


def strip_thoughts(text: str) -> tuple[str, bool]:
    """The answer without what was thought aloud; True if a thought was never ended."""
    text = _THOUGHT.sub("\n", text)
    tail = re.split(r"</think(?:ing)?>", text)[-1]  # some servers leave the opening tag out
    open_thought = _OPEN_THOUGHT.search(tail)
    return (tail[: open_thought.start()], True) if open_thought else (tail, False)


def plain_characters(text: str) -> str:
    """Full-width and other digits as ASCII, fractions behind a digit as decimals, nothing invisible."""
    text = re.sub(r"(?<=[0-9])\s?[½¼¾]", lambda match: _HALVES[match[0].strip()], text)
    text = _RAISED.sub(" ^ ", _INVISIBLE.sub("", text))
    return "".join(map(_plain_character, text))


def plain_markup(text: str) -> str:
    """Markdown, LaTeX and HTML undone; a table becomes one line per cell with its names before it."""
    text = html.unescape(text).replace("\u00a0", " ").replace("\r\n", "\n").replace("\r", "\n")
    text = _FRACTION.sub(r"\1/\2", _LATEX.sub(r"\1", text)).replace("\\(", " ").replace("\\)", " ")
    text = _STRUCK.sub(" ", text).replace("$", " ").replace("`", " ")
    text = re.sub(r"<\s*(\d+(?:\.\d+)?)\s*>", r"\1", text)
    text = _TAG.sub(" ", _BREAK.sub("\n", text))
    text = re.sub(r"(?<![0-9])\*+|\*+(?![0-9])|\*{2,}", "", text)
    text = re.sub(r"(?<=\w)_(?=\w)", " ", text).replace("__", "").replace("_", " ")
    text = re.sub(r"^\s*(?:#{1,6}\s+|>+\s*(?![\s\d]))", "", text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]{3,}", "  ", re.sub(r"\n{3,}", "\n\n", text))
    return "\n".join(line.rstrip() for line in _without_tables(text.split("\n")))


def _plain_character(char: str) -> str:
    code = ord(char)
    if 0xFF01 <= code <= 0xFF5E:
        return chr(code - 0xFEE0)
    if char == "\u3000":
        return " "
    if code > 0x7F and unicodedata.category(char) == "Nd":
        return str(unicodedata.decimal(char))
    return "-" if char == "\u2212" else char


def _without_tables(lines: list[str]) -> list[str]:
    """The lines; rows under a header and a rule of dashes are written as `row column: cell`."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        if at + 1 < len(lines) and "|" in lines[at] and "-" in lines[at + 1] and _RULE.fullmatch(lines[at + 1]):
            end = at + 2
            while end < len(lines) and "|" in lines[end]:
                end += 1
            out += _table(_cells(lines[at]), [_cells(line) for line in lines[at + 2 : end]])
            at = end
        else:
            out.append(lines[at])
            at += 1
    return out


def _table(names: list[str], rows: list[list[str]]) -> list[str]:
    if len(rows) == 1 or len(names) == 1:
        return [f"{name}: {cell}" for row in rows for name, cell in zip(names, row, strict=False)]
    return [f"{row[0]} {name}: {cell}" for row in rows for name, cell in list(zip(names, row, strict=False))[1:]]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
