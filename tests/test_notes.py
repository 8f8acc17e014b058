"""docs/notes.md answers for every statement of the notes: no id is missing, every test is there, every figure is kept."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.pages.tables import FIGURE, MADE_BY, kept_value, read_results, with_figures
from truebatch.errors import DataError
from truebatch_systems.vlm_pruning.config import PruningConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "notes.md"
STATEMENTS = {0: 20, 1: 14, 2: 16, 3: 16, 4: 11}
"""How many statements each note has, in the order vlm_pruning, seqset_vae, chinese_gpt, vl_reward, stitched_llm."""
STATES = {"works", "measured", "corrected"}
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> dict[str, tuple[str, str, str]]:
    """Statement, state and proof by id."""
    lines = re.findall(r"^\| (\d\.\d\d) \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == len({key for key, _ in lines}), "an id stands there twice"
    cells = {key: [cell.strip() for cell in line.split(" | ")] for key, line in lines}
    return {key: (found[0], found[1], found[2] if len(found) > 2 else "") for key, found in cells.items()}


ROWS = rows()


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_statement_is_missing_and_none_is_made_up():
    assert list(ROWS) == [f"{note}.{i:02}" for note, count in STATEMENTS.items() for i in range(1, count + 1)]


@pytest.mark.parametrize("key", ROWS)
def test_a_statement_has_a_state_and_what_belongs_to_it(key):
    statement, state, proof = ROWS[key]
    assert statement
    assert state in STATES
    if state in ("works", "corrected"):
        assert TEST.search(proof), "name the test that shows it"
    if state == "measured":
        assert FIGURE.search(proof), "name the figure and the result it is from"


def test_every_test_that_is_named_exists():
    named = TEST.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 50
    assert [f"{file}::{name}" for file, name in named if name not in functions_of(file)] == []


def test_every_figure_is_the_one_that_is_kept():
    text = PAGE.read_text(encoding="utf-8")
    assert len(FIGURE.findall(text)) > 15
    made = with_figures(text, read_results(ROOT / "docs" / "results"))
    assert text.splitlines() == made.splitlines(), f"run `{MADE_BY}` and read the page again"


def test_a_figure_follows_its_result():
    text = "`a.json: rows > way=x & size=4 > speed` = 1.5 and `a.json: ratios > b / c` = 2"
    results = {
        "a": {
            "rows": [{"way": "x", "size": 2, "speed": 9}, {"way": "x", "size": 4, "speed": 3.14159}],
            "ratios": {"b / c": 7},
        }
    }
    told = with_figures(text, results)
    assert told == "`a.json: rows > way=x & size=4 > speed` = 3.14 and `a.json: ratios > b / c` = 7"


@pytest.mark.parametrize("path", ["b > ratios", "a > ratio", "a > rows > way=y > speed"])
def test_a_figure_that_no_result_keeps_is_named(path):
    name, _, rest = path.partition(" > ")
    with pytest.raises(DataError, match="no result keeps"):
        kept_value({"a": {"rows": [{"way": "x"}]}}, name, rest)


def test_a_batch_of_the_notes_size_is_a_fifth_of_a_megabyte():
    assert torch.zeros(4, 50, 256).nbytes == 204_800


@pytest.mark.parametrize(("side", "tokens"), [(224, 256), (336, 576), (448, 1024)])
def test_vision_tokens_are_the_square_of_the_patches_of_a_side(side, tokens):
    patches = torch.nn.functional.conv2d(torch.zeros(1, 3, side, side), torch.zeros(1, 3, 14, 14), stride=14)
    assert patches.flatten(1).shape[1] == tokens


def test_true_batches_are_on_by_default_and_one_switch_turns_them_off():
    assert PruningConfig().backbone_settings.mllm_settings.enable_true_batch is True
