"""How Sphinx builds these pages: Markdown through MyST, warnings are errors (`make docs`)."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "src/truebatch/__init__.py").read_text(encoding="utf-8"))
assert VERSION is not None

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
