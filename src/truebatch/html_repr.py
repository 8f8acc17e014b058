"""Tables where a value is shown in a notebook: plain HTML, every text escaped, nothing that runs or loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(rows: Iterable[Sequence[object]], *, header: Sequence[object] = (), title: str = "") -> str:
    """A table for `_repr_html_`; the first cell of a row is its name."""
    head = "".join(f"<th>{_escaped(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + f"<th>{_escaped(row[0])}</th>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    caption = f"<caption>{_escaped(title)}</caption>" if title else ""
    return f"<table>{caption}{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def html_lines(lines: Iterable[object]) -> str:
    """Lines of words, one paragraph each."""
    return "".join(f"<p>{_escaped(line)}</p>" for line in lines)


def shown_text(text: object) -> str:
    """Text without control characters and halves of characters: some are not allowed in HTML, none can be seen."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in str(text))


def _escaped(value: object) -> str:
    return escape(shown_text(value))
