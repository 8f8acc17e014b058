"""docs/api.md: every public name once, with signature, summary and example, and as the docstrings say now."""

from __future__ import annotations

import re

import pytest

import truebatch
from tests.test_failures_page import load

API = load("api")
TEXT = API.PAGE.read_text(encoding="utf-8")


def test_the_page_is_that_of_the_docstrings():
    assert API.page() == TEXT, "run `python docs/pages/api.py` and keep the page"


def test_every_public_name_has_its_place_once():
    named = [name for names in API.GROUPS.values() for name in names]
    assert sorted(named) == truebatch.__all__


@pytest.mark.parametrize("name", truebatch.__all__)
def test_a_name_has_a_signature_a_summary_and_an_example(name):
    found = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None
    signature, _, rest = found[1].partition("```\n")
    assert re.search(rf"^(class )?tb\.{name}\b", signature, re.MULTILINE)
    summary = rest.strip().splitlines()[0]
    assert len(summary) > 15
    assert not summary.startswith("```")
    assert re.search(r"```python-console\n>>> .*?```", rest, re.DOTALL)
