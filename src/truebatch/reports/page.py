"""One self-contained HTML file: no scripts, nothing from outside, everything escaped, light and dark."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from truebatch import __version__
from truebatch.reports.tables import Table

MOST_BYTES = 1_500_000
"""A report is something to send: larger ones leave pictures out and say so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a report: words, then a table, then pictures; any of them may be absent."""

    title: str
    words: Sequence[str] = ()
    tables: Sequence[Table] = ()
    drawn: Sequence[str] = ()
    """SVG text that this process has drawn itself: it goes into the page as it is."""
    found: Sequence[str] = field(default=())
    """SVG text from a file: it is shown as an image, in which nothing can run."""
    images: Sequence[tuple[str, bytes, str]] = ()
    """Media type, bytes and caption of pictures."""


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The text of the page. Where it would be too large, the largest pictures are left out and their section says so."""
    kept = list(sections)
    text = _render(title, kept)
    while len(text.encode()) > MOST_BYTES and any(_weight(section) for section in kept):
        heaviest = max(range(len(kept)), key=lambda number: _weight(kept[number]))
        kept[heaviest] = _without_pictures(kept[heaviest])
        text = _render(title, kept)
    return text


def _render(title: str, sections: Sequence[Section]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = Markup
    environment.filters["image"] = _as_image
    environment.filters["clean"] = _clean
    text = environment.get_template("page.html.jinja").render(title=title, sections=sections, version=__version__)
    return text.encode("utf-8", "replace").decode("utf-8")


def _weight(section: Section) -> int:
    return sum(len(svg) for svg in (*section.drawn, *section.found)) + sum(len(data) for _, data, _ in section.images)


def _without_pictures(section: Section) -> Section:
    number = len(section.drawn) + len(section.found) + len(section.images)
    note = f"{number} picture(s) left out: the report would be larger than {MOST_BYTES / 1e6:g} MB"
    return Section(title=section.title, words=(*section.words, note), tables=section.tables)


def _as_image(data: str | bytes, media: str = "image/svg+xml") -> str:
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    return f"data:{media};base64,{base64.b64encode(raw).decode()}"


def _clean(text: str) -> str:
    """Text without control characters: some of them are not allowed in HTML, none can be seen."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in str(text))
