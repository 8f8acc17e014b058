"""One self-contained HTML file: no scripts, no external resources, everything escaped, light and dark mode."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from truebatch import __version__
from truebatch.html_repr import shown_text
from truebatch.language.locale import language
from truebatch.language.translate import in_words
from truebatch.reports.tables import Table

MOST_BYTES = 1_500_000
"""A report should be small enough to send: larger ones omit pictures and say so."""

Drawing = Callable[[], str]
"""Draws a picture as SVG text, when the page is made."""
Image = tuple[str, bytes, str]
"""Media type, bytes and caption of a picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One sample of a gallery."""

    title: str
    words: Sequence[str] = ()
    images: Sequence[Image] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of a report: text, tables, pictures, then a gallery; each is optional."""

    title: str
    words: Sequence[str] = ()
    tables: Sequence[Table] = ()
    drawn: Sequence[Drawing] = ()
    """Pictures drawn by this process: their SVG is embedded unchanged."""
    found: Sequence[str] = field(default=())
    """SVG text from a file: it is shown as an image, in which nothing can run."""
    images: Sequence[Image] = ()
    cards: Sequence[Card] = ()
    is_lead: bool = False
    """What a reader should see before anything else: larger, and without a heading on a page of one run."""
    is_folded: bool = False
    """Long and seldom wanted: shown when a reader opens it."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A section with its pictures drawn."""

    section: Section
    svgs: Sequence[str]

    @property
    def weight(self) -> int:
        """Size of all its pictures in bytes."""
        own = sum(len(svg) for svg in (*self.svgs, *self.section.found))
        images = [*self.section.images, *(image for card in self.section.cards for image in card.images)]
        return own + sum(len(data) for _, data, _ in images)


def render_page(title: str, sections: Sequence[Section], *, refresh_seconds: int | None = None) -> str:
    """Render the page. If it would be too large, the largest pictures are omitted and their section says so.

    A browser loads it again after `refresh_seconds`, if they are given.
    """
    ready = [_Ready(section, [draw() for draw in section.drawn]) for section in sections]
    text = _render(title, ready, refresh_seconds)
    while len(text.encode()) > MOST_BYTES and any(one.weight for one in ready):
        heaviest = max(range(len(ready)), key=lambda number: ready[number].weight)
        ready[heaviest] = _without_pictures(ready[heaviest])
        text = _render(title, ready, refresh_seconds)
    return text


def _render(title: str, ready: Sequence[_Ready], refresh_seconds: int | None) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = Markup
    environment.filters["image"] = _as_image
    environment.filters["clean"] = shown_text
    environment.filters["words"] = lambda text: in_words(shown_text(text))
    environment.filters["cell"] = lambda text: shown_text(in_words(text) if " " in text else text)
    text = environment.get_template("page.html.jinja").render(
        title=title,
        parts=ready,
        version=__version__,
        language="zh-CN" if language() == "zh" else "en",
        refresh=refresh_seconds,
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def _without_pictures(ready: _Ready) -> _Ready:
    section = ready.section
    shown = sum(len(card.images) for card in section.cards)
    number = len(ready.svgs) + len(section.found) + len(section.images) + shown
    note = f"{number} picture(s) omitted: the report would be larger than {MOST_BYTES / 1e6:g} MB"
    cards = [replace(card, images=()) for card in section.cards]
    return _Ready(replace(section, words=(*section.words, note), drawn=(), found=(), images=(), cards=cards), svgs=())


def _as_image(data: str | bytes, media: str = "image/svg+xml") -> str:
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    return f"data:{media};base64,{base64.b64encode(raw).decode()}"
