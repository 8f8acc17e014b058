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

from truebatch import errors
from truebatch.cli import app as cli
from truebatch.cli.app import app, run
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ENGLISH = [file for file in sorted(DOCS.rglob("*.md")) if ".zh-CN" not in file.name]
OWN_FILE = re.compile(r"# (\w+\.py)\b")
"""A block that begins with the name of a file is one that is started from outside, by torchrun for example."""
TASK = "task.py:system"
ELSEWHERE = (TASK, " hf ", "counting")
"""What settings belong to that is not there while pages are read: their own tests run these commands."""
TREE: Any = typer.main.get_command(app)


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(file: Path) -> list[str]:
    """Lines of the shell blocks."""
    lines = [line.partition(" #")[0].strip() for block in blocks(file, "sh") for line in block.splitlines()]
    lines = [re.sub(r"^torchrun .* -m truebatch ", "truebatch ", line) for line in lines]
    return [line for line in lines if line.startswith("truebatch ")]


def mentioned(file: Path) -> list[str]:
    """Commands in the running text, which may stand there without what they work on."""
    return re.findall(r"`(truebatch [^`\n]+)`", file.read_text(encoding="utf-8"))


RUN_HERE = {page: [block for block in blocks(page, "python") if not OWN_FILE.match(block)] for page in ENGLISH}
SOURCES = [*ENGLISH, *ROOT.glob("*.md")]
ALL_COMMANDS = sorted({line for page in SOURCES for line in commands(page)})
MENTIONED = sorted({line for page in SOURCES for line in mentioned(page)} - set(ALL_COMMANDS))
WITH_SETTINGS = [line for line in ALL_COMMANDS if " --set " in line and not any(name in line for name in ELSEWHERE)]


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
    if "--help" in words or (not words and hasattr(command, "commands")):
        return
    command.make_context(line, words).close()


@pytest.mark.parametrize("line", MENTIONED)
def test_a_command_that_is_mentioned_exists_with_its_options(line):
    words = shlex.split(line)[1:]
    command, rest = leaf_of(words)
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    assert command is not TREE or words[0] in known
    passes_on = command.context_settings.get("ignore_unknown_options")  # to the script of a benchmark
    assert passes_on or {word for word in rest if word.startswith("--")} <= known


@pytest.mark.slow  # two processes that import torch
@pytest.mark.parametrize(
    "page", [page for page in ENGLISH if "torchrun --nproc-per-node 2 " in page.read_text("utf-8")]
)
def test_files_for_torchrun_run_in_two_processes(page, tmp_path):
    for code in blocks(page, "python"):
        if named := OWN_FILE.match(code):
            (tmp_path / named[1]).write_text(code, encoding="utf-8")
    for line in re.findall(r"^torchrun (--nproc-per-node 2 .*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert "2 steps, loss" in done.stdout


@pytest.mark.parametrize("line", WITH_SETTINGS)
def test_the_settings_of_a_command_exist(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    settings = [part for word, value in pairwise(words) if word == "--set" for part in (word, value)]
    of_run = [Path(words[1]).name]  # a run is named after its system in these pages
    named = {
        "train": words[1:2], "fit": words[1:2], "verify": words[1:2], "config": words[2:3], "evaluate": of_run,
        "generate": of_run,
    }.get(words[0], words[:1])  # fmt: skip
    needed = ("model=m", "data=d.jsonl", "task=causal_lm") if named == ["hf"] else ()
    settings += [part for value in needed for part in ("--set", value)]
    assert run(["config", "check", *named, *settings]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in ALL_COMMANDS if line.startswith("truebatch init ")])
def test_starting_files_are_written(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(line)[1:]) == 0
    assert any(tmp_path.rglob("*.py"))


def test_the_guide_is_one_file_that_runs_and_its_commands_train_it(tmp_path, monkeypatch, capsys):
    guide = DOCS / "batchable.md"
    code = "\n\n".join(blocks(guide, "python"))
    exec(compile(code, str(guide), "exec"), {"__name__": "__main__"})
    told = capsys.readouterr().out
    assert told.startswith("BROKEN")
    assert re.search(r"^ *= +right padded", told, re.MULTILINE)
    assert re.search(r"^ *x +packed", told, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(code, encoding="utf-8")
    for line in (line for line in commands(guide) if TASK in line or "runs/tagger" in line):
        assert run(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert (tmp_path / "runs/tagger/report.html").exists()


def yours(page: Path) -> dict[str, Any]:
    """What a page calls yours."""
    if page.name != "migration.md":
        return {}
    pytest.importorskip("lightning")
    sft = pytest.importorskip("tests.adapters.test_sft", exc_type=ImportError)
    model = tiny_model("llama")
    dataset = make_samples(model, [3, 9, 4, 7, 5, 12, 6])
    return {"model": model, "dataset": dataset, "tokenizer": sft.tokenizer(), "pairs": sft.pairs(6)}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("page", [p for p in ENGLISH if RUN_HERE[p] and p.name != "batchable.md"], ids=lambda p: p.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n\n".join(RUN_HERE[page])
    exec(compile(code, str(page), "exec"), {"__name__": "__main__", **yours(page)})


STARTS = {"judge": ("runs/try",), "systems": ("chinese_gpt", "runs/first")}
"""Pages of ten minutes -> words of the commands that need nothing of the reader's."""


@pytest.mark.slow  # it trains twenty steps
@pytest.mark.parametrize("page", STARTS)
def test_the_commands_of_ten_minutes_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = DOCS / f"start/{page}.md"
    exec(compile("\n\n".join(RUN_HERE[file]), str(file), "exec"), {"__name__": "__main__"})
    lines = [line for line in commands(file) if any(word in line for word in STARTS[page])]
    assert len(lines) >= 3
    for line in lines:
        has_failures = "score " in line or "run status" in line  # the page's empty prompt
        assert run(shlex.split(line)[1:]) == (3 if has_failures else 0), capsys.readouterr().err
        assert capsys.readouterr().out.strip()


def test_the_codes_and_kinds_of_failure_are_those_of_the_program(capsys):
    text = (DOCS / "codes.md").read_text(encoding="utf-8")
    classes = {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.TruebatchError)}
    del classes["TruebatchError"]
    codes = {name: str(errors.exit_code_of(kind("", seen="", do=""))) for name, kind in classes.items()}
    assert dict(re.findall(r"^\| `(\w+Error)` \|.*\| (\d+) \|$", text, re.MULTILINE)) == codes
    told = set(re.findall(r"^\| (\d+) \|", text, re.MULTILINE))
    assert told == set(re.findall(r"\b(\d+) [a-z]", cli.__doc__ or ""))
    files = [file.read_text(encoding="utf-8") for file in (ROOT / "src/truebatch/scoring").rglob("*.py")]
    made = {kind for file in files for kind in re.findall(r'SampleError\(\s*"\w+", "(\w+)"', file)}
    listed = set(re.findall(r"`(\w+)`", text.partition("| stage | kinds |")[2].partition("\n\n")[0]))
    assert made <= listed
    assert all(any(f'"{kind}"' in file for file in files) for kind in listed)
    message = re.search(r"```text\n(.*?  seen: (.*?)\n.*?)```", text, re.DOTALL)
    assert run(shlex.split(message[2])[1:]) == 2
    assert capsys.readouterr().err == message[1]
