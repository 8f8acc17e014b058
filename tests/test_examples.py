"""Examples by feature: each is short, proves its model, and trains it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "by_feature"
EXAMPLES = sorted(FOLDER.glob("*.py"))
QUICK = ("graph_network", "nested_sets")
PAGES = [Path(__file__).parents[1] / "docs" / name for name in ("fields.md", "fields.zh-CN.md")]


@pytest.mark.parametrize(
    "file",
    [pytest.param(one, id=one.stem, marks=() if one.stem in QUICK else pytest.mark.slow) for one in EXAMPLES],
)
def test_an_example_proves_its_model_and_trains_it(file, capsys):
    runpy.run_path(str(file), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("EQUAL: every sample gets what it gets alone")
    assert float(said[-1]) > 0


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_short_and_on_the_page(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 60
    assert all(f"examples/by_feature/{file.name}" in page.read_text(encoding="utf-8") for page in PAGES)
