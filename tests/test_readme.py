"""The README tells the truth: its code runs, its commands run. That both languages say the same is in test_docs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import truebatch
from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.cli.app import run

REPOSITORY = Path(__file__).parent.parent
READMES = [REPOSITORY / "README.md", REPOSITORY / "README.zh-CN.md"]
ROOT = Path(truebatch.__file__).parent


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(file: Path) -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks(file, "sh") for line in block.splitlines()]
    inline = re.findall(r"`((?:make|truebatch) [^`\n]+)`", file.read_text(encoding="utf-8"))
    return [line for line in [*lines, *inline] if line]


def test_the_ten_lines_plan_and_collate(capsys):
    code = blocks(READMES[0], "python")[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(code, {"__name__": "__main__"})
    ids = [int(i) for i in re.findall(r"\d+", capsys.readouterr().out.rpartition("(")[2])]
    assert sorted(ids) == [0, 1, 2]


def test_the_check_of_a_users_own_model_finds_its_fault(capsys):
    exec(blocks(READMES[0], "python")[0], {"__name__": "__main__"})
    told = capsys.readouterr().out
    assert told.startswith("BROKEN")
    assert "likely cause: " in told


def test_the_loop_after_the_change_runs_whole_steps():
    (diff,) = blocks(READMES[0], "diff")
    code = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    dataset = text_samples([3, 31, 8, 17, 4], vocab=17)
    model = TextModel(vocab=17)
    before = model.head.weight.clone()
    lengths = [len(sample["input_ids"]) for sample in dataset]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "objective": NextToken(), "fields": TEXT_FIELDS, "dataset": dataset, "lengths": lengths}
    exec(code, {"tb": truebatch, "optimiser": optimiser, "epoch": 0, **given})
    assert not torch.equal(before, model.head.weight)


USER_CODE = """
import torch
model = torch.nn.Linear(4, 2)
samples = [torch.randn(n, 4) for n in (3, 1, 6, 2)]
def single(sample):
    return model(sample)
def batched(samples):
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return [row[: len(sample)] for row, sample in zip(model(padded), samples)]
"""


@pytest.mark.parametrize("command", [c for c in commands(READMES[0]) if c.startswith("truebatch")])
def test_every_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    Path("train.jsonl").write_text("".join(json.dumps({"text": "ab" * (i % 50 + 1)}) + "\n" for i in range(300)))
    Path("train.py").write_text(USER_CODE)
    assert run(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", [c for c in commands(READMES[0]) if c.startswith("make")])
def test_every_make_target_exists(command):
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_readme_is_read_in_one_go():
    assert all(len(file.read_text(encoding="utf-8").splitlines()) < 200 for file in READMES)


@pytest.mark.parametrize("readme", READMES, ids=lambda f: f.name)
def test_the_map_names_every_room_and_nothing_else(readme):
    text = readme.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([a-z_]+)(?:/|\.py)`", text, re.MULTILINE))
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and len(list(path.glob("*.py"))) > 1}
    files = {path.stem for path in ROOT.glob("*.py") if path.name != "__init__.py"}
    assert folders <= named
    assert named <= folders | files
