"""The gallery of failures tells the truth: every command says what the page shows, and every fix is that of the file."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
QUICK = ("two_dimensional_mask", "first_image_for_all")


def load(name: str) -> ModuleType:
    """A script of docs/pages as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_pages_{name}", ROOT / f"docs/pages/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


GALLERY: Any = load("failures")


def without_digits(text: str) -> str:
    """Lines of other versions of a library, and rounding of another machine, are not meant."""
    return re.sub(r"\s+", " ", re.sub(r"\d+", "0", text))


def kept(number: int, language: str) -> str:
    text = GALLERY.PAGES[language].read_text(encoding="utf-8")
    found = re.search(rf"^## {number}\. .*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def test_the_page_has_twenty_failures_each_with_its_fix_and_its_report():
    assert len(GALLERY.FAILURES) == 20
    assert len({one.issue for one in GALLERY.FAILURES}) == 20
    for number, one in enumerate(GALLERY.FAILURES, 1):
        for language in GALLERY.PAGES:
            text = kept(number, language)
            assert "\n".join(GALLERY.change(one)) in text
            assert one.link in text
            assert one.title[language] in text
            assert f"$ {one.command()}\n" in text
            assert f"$ {one.command(mended=True)}\n" in text


def test_no_line_of_the_page_is_too_long_to_edit():
    for file in GALLERY.PAGES.values():
        assert max(map(len, file.read_text(encoding="utf-8").splitlines())) <= 160


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=one.name, marks=() if one.name in QUICK else pytest.mark.slow)
        for number, one in enumerate(GALLERY.FAILURES, 1)
    ],
)
def test_a_failure_is_found_and_its_fix_is_proven_in_the_words_of_the_page(number, language):
    shown = GALLERY.entry(number, GALLERY.FAILURES[number - 1], language)
    assert without_digits(kept(number, language)) == without_digits(shown) + " "
