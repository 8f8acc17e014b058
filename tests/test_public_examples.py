"""Every public name has an example in its docstring, and the example is true."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import truebatch

DOCS = Path(__file__).parents[1] / "docs"
SHOWN_ON_A_PAGE = {
    "PackedEncoder", "PackedRankingLoss", "PlannedDataModule", "SharedPromptMixin", "TruebatchMixin", "lightning_loss",
}  # fmt: skip
"""They need a trainer of another library around them; pages (migration, pairs, coupled) are their example."""


def documented() -> dict[str, Any]:
    """What the pages import from rooms of the package, beside the public names."""
    found = {name: getattr(truebatch, name) for name in truebatch.__all__}
    for page in DOCS.glob("*.md"):
        for module, names in re.findall(
            r"^from (truebatch\.[\w.]+) import (.+)$", page.read_text("utf-8"), re.MULTILINE
        ):
            for name in names.split(", "):
                if name not in SHOWN_ON_A_PAGE:
                    __import__(module)
                    found[name] = getattr(sys.modules[module], name)
    return found


NAMES = documented()


def examples_of(name: str) -> doctest.DocTest:
    """Its own, or, of a function whose docstring has no room left, that of its file."""
    own, file = inspect.getdoc(NAMES[name]) or "", inspect.getdoc(inspect.getmodule(NAMES[name])) or ""
    docstring = own if ">>>" in own or not re.search(rf"^>>> .*\b{name}\(", file, re.MULTILINE) else file
    assert ">>>" in docstring, f"{name} has no example"
    return doctest.DocTestParser().get_doctest(docstring, {"__name__": "__main__"}, name, None, None)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_example_of_a_public_name_is_true(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test = examples_of(name)
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(told)


def test_every_public_name_says_what_it_does():
    assert [name for name, named in NAMES.items() if not (inspect.getdoc(named) or "").split("\n")[0].strip()] == []
