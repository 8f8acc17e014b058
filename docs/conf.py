"""How Sphinx builds these pages: Markdown through MyST, warnings are errors (`make docs`)."""

import re
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).parents[1]
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "src/truebatch/__init__.py").read_text(encoding="utf-8"))
assert VERSION is not None
SEARCH = Path(__file__).with_name("pages").joinpath("search_tables.js").read_text(encoding="utf-8")
LONG = 20
"""Rows from which on a table can be searched."""

project = "truebatch"
author = "truebatch contributors"
copyright = "truebatch contributors, Apache-2.0"  # noqa: A001 - the name Sphinx asks for
release = version = VERSION[1]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "results"]
root_doc = "index"
nitpicky = True

html_theme = "furo"
html_title = f"truebatch {release}"
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 3


def _of_page(app, pagename, templatename, context, doctree):  # type: ignore[no-untyped-def]
    """Pages say the language they are in; those with long tables can be searched."""
    if pagename.endswith(".zh-CN"):
        context["language"] = "zh-CN"
    if doctree is not None and any(len(body.children) >= LONG for body in doctree.findall(nodes.tbody)):
        context["body"] += f"<script>\n{SEARCH}</script>\n"


def setup(app):  # type: ignore[no-untyped-def]
    """What Sphinx calls."""
    app.connect("html-page-context", _of_page)
