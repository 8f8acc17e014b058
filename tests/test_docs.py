"""The pages under docs/ tell the truth: both languages say the same, links lead somewhere, figures are those kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHINESE = [*sorted(DOCS.rglob("*.zh-CN.md")), ROOT / "README.zh-CN.md"]
ENGLISH = [file.with_name(file.name.replace(".zh-CN", "")) for file in CHINESE]
MADE = {"api.md", "benchmarks.md", "census-popular.md", "census.md", "config.md", "lab.md", "notes.md"}
MADE |= {f"benchmarks/{file.name}" for file in (DOCS / "benchmarks").glob("*.md")}
"""Tables written by commands, and the lab book: in English only."""
RESULTS = DOCS / "results"
"""Kept results, and the tables that a benchmark writes beside them: no pages."""
PAGES = [*sorted(file for file in DOCS.rglob("*.md") if RESULTS not in file.parents), *sorted(ROOT.glob("*.md"))]
FIGURE = re.compile(r"(\d[\d,.]*(?:e-\d+)?)(?<![,.])[^\d|<]*<!-- (\w+\.json) ([^>]+?)(?: x([\de.-]+))? -->")
"""A number and, in a comment behind it, where it is kept: `1,000 <!-- reliability.json sweeps/random kills/trials -->`."""


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def fenced(text: str) -> list[str]:
    """Code blocks. A table of contents is not one: Sphinx itself complains of a page that is in none."""
    return [block for block in re.findall(r"```.*?```", text, re.DOTALL) if "{toctree}" not in block]


def numbers(text: str) -> Counter[str]:
    """Numbers of the prose: neither code, nor where a link leads, nor a name with a digit in it."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", text, flags=re.DOTALL)
    return Counter(re.findall(r"(?<![A-Za-z0-9_.-])\d+(?:[.,]\d+)*(?!-?[A-Za-z])", prose))


def test_every_page_is_there_in_both_languages():
    single = {file.relative_to(DOCS).as_posix() for file in PAGES if DOCS in file.parents} - {
        file.relative_to(DOCS).as_posix() for pair in (CHINESE, ENGLISH) for file in pair if DOCS in file.parents
    }
    assert single == MADE


def test_every_system_that_can_be_begun_with_has_its_page():
    begun = {folder.parent.name for folder in (ROOT / "src/truebatch_systems").glob("*/starter")}
    pages = {file.stem for file in (DOCS / "systems").glob("*.md") if "zh-CN" not in file.name}
    assert pages == begun


@pytest.mark.parametrize(("english", "chinese"), zip(ENGLISH, CHINESE, strict=True), ids=lambda file: file.name)
def test_both_languages_have_the_same_headings_code_lists_tables_and_numbers(english, chinese):
    first, second = text_of(english), text_of(chinese)
    outside = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in (first, second)]
    for pattern in (r"^#+ ", r"^- ", r"^\d+\. ", r"^\*\*", r"^\|"):
        assert len({tuple(re.findall(pattern, text, re.MULTILINE)) for text in outside}) == 1, pattern
    if english.name == "failures.md":  # commands speak the language of their page
        first, second = (re.sub(r"```text.*?```", "", text, flags=re.DOTALL) for text in (first, second))
    assert fenced(first) == fenced(second)
    assert numbers(first) == numbers(second)


@pytest.mark.parametrize("page", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", text_of(page))
    assert [link for link in links if not link.startswith("http") and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:tests|src|docs|benchmarks)/[\w/.-]+\.\w+)`", text_of(page))
    assert [name for name in named if not (ROOT / name.replace("NAME", "chinese_gpt")).exists()] == []


def kept(name: str, path: str) -> float:
    """A value of a kept result: names and positions with `/` between them; `#` counts the entries."""
    found: Any = json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))
    for part in path.split("/"):
        found = len(found) if part == "#" else found[int(part) if isinstance(found, list) else part]
    return float(found)


@pytest.mark.parametrize("page", [page for page in PAGES if FIGURE.search(text_of(page))], ids=lambda file: file.name)
def test_figures_are_those_of_the_kept_results(page):
    wrong = []
    for shown, name, path, factor in FIGURE.findall(text_of(page)):
        value = kept(name, path) * float(factor or 1)
        mantissa = shown.partition("e")[0]
        kind = f"{len(mantissa.partition('.')[2])}{'e' if 'e' in shown else 'f'}"
        if f"{value:,.{kind}}".replace(",", "") != shown.replace(",", ""):
            wrong.append(f"{shown} is {value:,.{kind}} in {name} {path}")
    assert wrong == []
    assert len(FIGURE.findall(text_of(page))) == len(re.findall(r"<!-- \w+\.json ", text_of(page)))  # none escapes


def test_sphinx_builds_the_pages_without_a_warning(tmp_path):
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="the extra `docs` is not installed; `make docs` installs it")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "dummy", DOCS, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
