"""The pages under docs/ tell the truth: their code runs, their commands are right, both languages say the same."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from truebatch.cli import run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHINESE = sorted(DOCS.rglob("*.zh-CN.md"))
ENGLISH = [file.with_name(file.name.replace(".zh-CN", "")) for file in CHINESE]
GROUPS = ("bench", "config", "chinese_gpt", "seqset_vae", "stitched_llm", "vl_reward", "vlm_pruning")
"""Commands with commands of their own."""
OF_A_TASK = "task.py:system"


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(file: Path) -> list[str]:
    return [line for block in blocks(file, "sh") for line in block.splitlines()]


COMMANDS = sorted({line for file in ENGLISH for line in commands(file) if OF_A_TASK not in line})


def test_every_system_that_can_be_begun_with_has_its_page():
    begun = {folder.parent.name for folder in (ROOT / "src/truebatch/systems").glob("*/starter")}
    pages = {file.stem for file in (DOCS / "systems").glob("*.md") if "zh-CN" not in file.name}
    assert pages == begun


@pytest.mark.parametrize(("english", "chinese"), zip(ENGLISH, CHINESE, strict=True), ids=lambda file: file.name)
def test_both_languages_have_the_same_headings_code_and_lists(english, chinese):
    first, second = english.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8")
    for pattern in (r"^#+", r"^- ", r"^\*\*"):
        assert len(re.findall(pattern, first, re.MULTILINE)) == len(re.findall(pattern, second, re.MULTILINE))
    assert re.findall(r"```.*?```", first, re.DOTALL) == re.findall(r"```.*?```", second, re.DOTALL)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda file: str(file.relative_to(DOCS)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith("http") and not (page.parent / link).exists()] == []


def in_process(code: str, folder: Path, *arguments: str) -> str:
    (folder / "task.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "task.py", *arguments], cwd=folder, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_guide_is_one_file_that_runs_and_its_commands_train_it(tmp_path, monkeypatch, capsys):
    guide = DOCS / "guide.md"
    told = in_process("\n\n".join(blocks(guide, "python")), tmp_path)
    assert told.startswith("BROKEN")
    assert "= right padded" in told
    assert "x packed" in told
    monkeypatch.chdir(tmp_path)
    for line in (line for line in commands(guide) if OF_A_TASK in line or "runs/tagger" in line):
        assert run(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert (tmp_path / "runs/tagger/report.html").exists()


def test_code_of_the_other_pages_runs(tmp_path):
    code = "\n\n".join(block for block in blocks(DOCS / "troubleshooting.md", "python"))
    assert "must match" in in_process(code, tmp_path)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_exists_with_its_options_and_its_settings(line, tmp_path, monkeypatch, capsys):
    """Nothing is trained: the help knows every option, and `config check` every setting."""
    _, *words = shlex.split(line)
    path = words[: 2 if words[0] in GROUPS else 1]
    monkeypatch.chdir(tmp_path)
    assert run([*path, "--help"]) == 0
    known = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in known] == []
    settings = [part for word, value in pairwise(words) if word == "--set" for part in (word, value)]
    targets = {"train": words[1:2], "config": words[2:3]}.get(words[0], path[:1])
    if settings and targets[0] != "hf":
        assert run(["config", "check", *targets, *settings]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("truebatch init")])
def test_starting_files_are_written(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(line)[1:]) == 0
    assert any(tmp_path.rglob("*.py"))
