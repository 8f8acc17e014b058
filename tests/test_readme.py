"""The README tells the truth: its code runs, its commands run. That both languages say the same is in test_docs."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import truebatch
from tests.hf.finetune.folders import chats, model_folder, write_lines
from tests.test_docs import kept
from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.cli.app import run

REPOSITORY = Path(__file__).parent.parent
READMES = [REPOSITORY / "README.md", REPOSITORY / "README.zh-CN.md"]


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(file: Path) -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks(file, "sh") for line in block.splitlines()]
    inline = re.findall(r"`((?:make|truebatch) [^`\n]+)`", file.read_text(encoding="utf-8"))
    return [line for line in [*lines, *inline] if line]


def test_the_three_lines_prove_a_model():
    exec(blocks(READMES[0], "python")[0], {"__name__": "__main__"})


def test_the_loop_after_the_change_runs_whole_steps():
    (diff,) = blocks(REPOSITORY / "docs/batchable.md", "diff")
    code = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    dataset = text_samples([3, 31, 8, 17, 4], vocab=17)
    model = TextModel(vocab=17)
    before = model.head.weight.clone()
    lengths = [len(sample["input_ids"]) for sample in dataset]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "objective": NextToken(), "fields": TEXT_FIELDS, "dataset": dataset, "lengths": lengths}
    exec(code, {"tb": truebatch, "optimiser": optimiser, "epoch": 0, **given})
    assert not torch.equal(before, model.head.weight)


SHORTER = {"truebatch train chinese_gpt": "--set train.max_steps=1", "truebatch init NAME": "chinese_gpt"}


@pytest.mark.parametrize("command", dict.fromkeys(c for c in commands(READMES[0]) if c.startswith("truebatch")))
def test_every_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    model_folder(Path("my-model"))
    write_lines(Path("chats.jsonl"), chats())
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": "red " * (i + 1)}) + "\n" for i in range(6)))
    words = command.replace("NAME", "").split()
    assert run([*words[1:], *SHORTER.get(command, "").split()]) == 0
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", [c for c in commands(READMES[0]) if c.startswith("make")])
def test_every_make_target_exists(command):
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_readme_is_read_in_one_go():
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 120 for file in READMES)


FIGURES = {
    "one sample at a time": ("training_cuda.json", "rows/0/tokens_per_second"),
    "Hugging Face, 8 padded rows": ("training_cuda.json", "rows/1/tokens_per_second"),
    "Hugging Face, 8 grouped by length": ("training_cuda.json", "rows/2/tokens_per_second"),
    "TRL, padding-free": ("training_cuda.json", "rows/11/tokens_per_second"),
    "truebatch, packed": ("training_cuda.json", "rows/5/tokens_per_second"),
    "truebatch, packed and compiled": ("training_cuda.json", "rows/8/tokens_per_second"),
    "the bound: compiled, all samples of one length": ("training_cuda.json", "rows/9/tokens_per_second"),
    "`train hf` as it is typed above, without settings, between its checkpoints": (
        "train_command_cuda.json", "rows/0/tokens_per_second_of_steps",
    ),
    "the Hugging Face Trainer, 8 padded rows, in the same run as the line above": (
        "train_command_cuda.json", "rows/1/tokens_per_second",
    ),
}  # fmt: skip
"""Row of the table of speeds -> the kept result that it shows."""


def speeds(readme):
    return re.findall(r"^\| (.+?) \| ([\d,]+) \|$", readme.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_table_of_speeds_shows_what_was_kept():
    assert dict(speeds(READMES[0])) == {name: f"{kept(*where):,.0f}" for name, where in FIGURES.items()}
    assert [figure for _, figure in speeds(READMES[1])] == [figure for _, figure in speeds(READMES[0])]


def test_the_figures_of_the_prose_are_those_that_were_kept():
    judged = [f"{kept('scoring_cuda.json', f'rows/{row}/samples_per_second'):.1f}" for row in (0, 6)]
    kills = f"{kept('reliability.json', 'sweeps/random kills/trials'):,.0f}"
    assert kept("reliability.json", "sweeps/random kills/failed") == 0
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        assert all(f" {figure} " in text for figure in judged)
        assert text.count(kills) == 2


@pytest.mark.parametrize("language", ["en", pytest.param("zh", marks=pytest.mark.slow)])
def test_the_picture_shows_what_the_commands_print(language):
    spec = importlib.util.spec_from_file_location("docs_pictures_terminal", REPOSITORY / "docs/pictures/terminal.py")
    terminal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(terminal)

    def without_digits(picture):
        return re.sub(r"\d", "0", picture)

    drawn = terminal.draw(terminal.all_lines(language), language)
    assert without_digits(drawn) == without_digits(terminal.FILES[language].read_text(encoding="utf-8"))
