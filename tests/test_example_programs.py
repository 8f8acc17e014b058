"""The examples: each is the plain program with few lines changed, and does what it says."""

from __future__ import annotations

import difflib
import runpy
from pathlib import Path

import pytest

FOLDERS = sorted(path.parent for path in (Path(__file__).parents[1] / "examples").glob("*/with_truebatch.py"))
MOST_CHANGED_LINES = 15


def changed_lines(folder: Path) -> int:
    """Lines that are taken away or come in their place, whichever are more."""
    plain, ours = ((folder / f"{name}.py").read_text().splitlines() for name in ("plain", "with_truebatch"))
    blocks = difflib.SequenceMatcher(None, plain, ours, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in blocks if tag != "equal")


def test_every_example_is_named_in_the_table():
    table = (FOLDERS[0].parent / "README.md").read_text()
    assert FOLDERS
    assert all(f"| `{folder.name}` |" in table for folder in FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_example_changes_few_lines_and_runs(folder, capsys, tmp_path, monkeypatch):
    assert 0 < changed_lines(folder) <= MOST_CHANGED_LINES
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "with_truebatch"):
        runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["attn_implementation", "key_dropout"])
def test_an_example_shows_the_error_and_its_end(name, capsys):
    folder = next(folder for folder in FOLDERS if folder.name == name)
    errors = []
    for program in ("plain", "with_truebatch"):
        runpy.run_path(str(folder / f"{program}.py"))
        errors.append(float(capsys.readouterr().out.rpartition(":")[2]))
    assert errors[0] > 0.1
    assert errors[1] < 2e-6


@pytest.mark.parametrize("name", ["policy_gradient", "trl_dpo"])
def test_answers_that_share_a_prompt_are_learned_from(name, capsys):
    if name == "trl_dpo":
        pytest.importorskip("trl")
    file = FOLDERS[0].parent / "shared_prompts" / f"{name}.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 60
    runpy.run_path(str(file), run_name="__main__")
    before, after = capsys.readouterr().out.splitlines()[-1].partition(": ")[2].split(" -> ")
    assert (float(after) > float(before)) == (name == "policy_gradient")
