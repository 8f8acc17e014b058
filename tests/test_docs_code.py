"""The code and the commands of the pages run as they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from truebatch.cli import app, run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ENGLISH = [file for file in sorted(DOCS.rglob("*.md")) if ".zh-CN" not in file.name]
OWN_FILE = re.compile(r"# (\w+\.py)\b")
"""A block that begins with the name of a file is one that is started from outside, by torchrun for example."""
TASK = "task.py:system"
TREE: Any = typer.main.get_command(app)


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(file: Path) -> list[str]:
    """Lines of the shell blocks."""
    lines = [line.partition(" #")[0].strip() for block in blocks(file, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("truebatch ")]


def mentioned(file: Path) -> list[str]:
    """Commands in the running text, which may stand there without what they work on."""
    return re.findall(r"`(truebatch [^`\n]+)`", file.read_text(encoding="utf-8"))


RUN_HERE = {page: [block for block in blocks(page, "python") if not OWN_FILE.match(block)] for page in ENGLISH}
SOURCES = [*ENGLISH, *ROOT.glob("*.md")]
ALL_COMMANDS = sorted({line for page in SOURCES for line in commands(page)})
MENTIONED = sorted({line for page in SOURCES for line in mentioned(page)} - set(ALL_COMMANDS))
WITH_SETTINGS = [line for line in ALL_COMMANDS if " --set " in line and TASK not in line and " hf " not in line]


def leaf_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line leads to, and the words that it gets."""
    command = TREE
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("line", ALL_COMMANDS)
def test_a_command_is_understood_with_all_its_options(line):
    """Nothing is run: every word finds its place, or the parser would refuse it."""
    command, words = leaf_of(shlex.split(line)[1:])
    if "--help" in words or not words and hasattr(command, "commands"):
        return
    command.make_context(line, words).close()


@pytest.mark.parametrize("line", MENTIONED)
def test_a_command_that_is_mentioned_exists_with_its_options(line):
    words = shlex.split(line)[1:]
    command, rest = leaf_of(words)
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    assert command is not TREE or words[0] in known
    assert {word for word in rest if word.startswith("--")} <= known


@pytest.mark.parametrize("line", WITH_SETTINGS)
def test_the_settings_of_a_command_exist(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    settings = [part for word, value in pairwise(words) if word == "--set" for part in (word, value)]
    named = {"train": words[1:2], "fit": words[1:2], "verify": words[1:2], "config": words[2:3]}.get(
        words[0], words[:1]
    )
    assert run(["config", "check", *named, *settings]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in ALL_COMMANDS if line.startswith("truebatch init ")])
def test_starting_files_are_written(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(line)[1:]) == 0
    assert any(tmp_path.rglob("*.py"))


def in_process(code: str, folder: Path) -> str:
    (folder / "task.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "task.py"], cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_guide_is_one_file_that_runs_and_its_commands_train_it(tmp_path, monkeypatch, capsys):
    guide = DOCS / "batchable.md"
    told = in_process("\n\n".join(blocks(guide, "python")), tmp_path)
    assert told.startswith("BROKEN")
    assert "= right padded" in told
    assert "x packed" in told
    monkeypatch.chdir(tmp_path)
    for line in (line for line in commands(guide) if TASK in line or "runs/tagger" in line):
        assert run(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert (tmp_path / "runs/tagger/report.html").exists()


@pytest.mark.parametrize("page", [p for p in ENGLISH if RUN_HERE[p] and p.name != "batchable.md"], ids=lambda p: p.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n\n".join(RUN_HERE[page])
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
