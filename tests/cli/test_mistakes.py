"""Forty common mistakes, each as the person makes it: the message says what is wrong, what was seen, and what to do."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import truebatch
from tests.hostile.model_folders import _saved
from truebatch.cli.app import run
from truebatch.errors import TruebatchError
from truebatch.testing.failpoints import armed
from truebatch.training.run_dir.run_dir import open_run

ROOT = Path(__file__).parents[2]
TASK = "train task.py:system --set num_samples=6 --out runs/new"
HF = "train hf --model model --data chats.jsonl --task causal_lm"
FILES = {
    "train.jsonl": '{"text": "hello"}\n' * 4, "table.jsonl": "id,text\n1,a\n", "empty.jsonl": "", "notes.rtf": "hi\n",
    "half.yaml": "train:\n  epochs: [1, 2\n", "tab.yaml": "train:\n\tepochs: 1\n", "colon.yaml": "epochs:3\n",
    "trainer.yaml": "train:\n  num_train_epochs: 3\n", "lr.yaml": "train:\n  lr: 1e-4\n", "wide.yaml": "train：\n  epochs: 3\n",
    "number.yaml": "train:\n  learning_rate: true\n", "raises.py": "values = [1]\nsamples = values[3]\n",
}  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """A command line, and words of the three parts of what is said."""

    line: str
    wrong: str
    seen: str
    do: str


MISTAKES = [
    # What is typed
    Mistake("trian hf", "No such command 'trian'. Did you mean 'train'?", "truebatch trian hf", "--help"),
    Mistake("plan train.jsonl --cell 100", "--cells", "--cell 100", "truebatch plan --help"),
    Mistake("doctor --dril", "--drill", "--dril", "truebatch doctor --help"),
    Mistake("train", "Missing argument", "truebatch train", "truebatch train --help"),
    Mistake("plan", "name either DATA or --lengths", "neither", "truebatch plan train.jsonl --cells 8192"),
    Mistake(f"{HF} --batch_size 8", "No such option: --batch_size", "--batch_size 8", "--set train.batch_size=..."),
    Mistake("plan train.jsonl --batch_size 8", "--batch_size", "--batch_size 8", "write --samples N"),
    Mistake(f"{HF} --learning_rate 1e-4", "--learning_rate", "--learning_rate", "--set train.learning_rate=..."),
    Mistake(f"{HF} --num_train_epochs 3", "--num_train_epochs", "--num_train_epochs 3", "--set train.epochs=..."),
    Mistake(f"{HF} --output_dir x", "--output_dir", "--output_dir x", "write --out FOLDER"),
    Mistake(
        "plan train.jsonl --layout paked", "did you mean 'packed'?", "layout = 'paked', --layout", "change --layout"
    ),
    Mistake("plan train.jsonl --overlong trim", "'refuse', 'drop', 'cut'", "overlong = 'trim'", "change --overlong"),
    # Names of systems, targets and files
    Mistake("train chinesegpt", "did you mean 'chinese_gpt'?", "systems: chinese_gpt, hf", "name one of them"),
    Mistake("init chinese_gtp", "did you mean 'chinese_gpt'?", "chinese_gpt", "name one of them"),
    Mistake("train task.py.system", "does not say which name", "'task.py.system'", "task.py:NAME"),
    Mistake("train task.py", "does not say which name", "'task.py'", "task.py:NAME"),
    Mistake("train task.py：system", "'：' is the full-width colon", "task.py：system", "colon"),
    Mistake("plan task.py：samples", "'：' is the full-width colon", "task.py：samples", "colon"),
    Mistake("train task.py:number", "is not a system", "a int", "name a truebatch.System"),
    Mistake("plan task.py", "give the name in it", "'task.py'", "write task.py:NAME"),
    Mistake("plan task.py:sampels", "did you mean 'Samples'?", "names there:", "name one of them after the colon"),
    Mistake("plan raises.py:samples", "raised IndexError", "raises.py:2: samples = values[3]", "correct that line"),
    Mistake("verify nothing:x", "there is no module 'nothing'", "nothing:x", "path/to/file.py:name"),
    Mistake("plan train.jsnol", "did you mean 'train.jsonl'?", "holds", "check the path"),
    Mistake("plan runs", "runs is a folder, but a file is needed", "it holds", "give the path of one file in it"),
    Mistake("config check plan --config mising.yaml", "there is no file mising.yaml", "holds", "check the path"),
    # Settings
    Mistake(f"{TASK} --config half.yaml", "half.yaml:3 not readable as YAML", "epochs: [1, 2", "write `key: value`"),
    Mistake(f"{TASK} --config tab.yaml", "tab.yaml:2 a tab is used", "\\tepochs: 1", "replace tabs by spaces"),
    Mistake(f"{TASK} --config colon.yaml", "colon.yaml:1", "'epochs:3'", "with a space after the colon"),
    Mistake(f"{TASK} --config wide.yaml", "wide.yaml:1 uses the full-width character '：'", "train：", "half-width"),
    Mistake(f"{TASK} --config trainer.yaml", "did you mean 'epochs'?", "trainer.yaml:2: num_train_epochs", "epochs"),
    Mistake(f"{TASK} --config lr.yaml", "did you mean 'learning_rate'?", "lr.yaml:2: lr", "learning_rate"),
    Mistake(f"{TASK} --config number.yaml", "must be a number", "true, number.yaml:2", "give learning_rate a number"),
    Mistake(f"{TASK} --set batch_size=8", "did you mean 'train.batch_size'?", "batch_size=8", "train"),
    Mistake(f"{TASK} --set per_device_train_batch_size=8", "'train.batch_size'", "override", "use one of"),
    Mistake(f"{TASK} --set train.accumulate_grad_batches=2", "'gradient_accumulation_steps'", "override", "use one of"),
    Mistake(f"{TASK} --set train.epochs", "an override must be key=value", "'train.epochs'", "a.b=value"),
    Mistake(f"{TASK} --set train.epochs=three", "valid integer", "train.epochs = 'three'", "change override"),
    Mistake(f"{TASK} --set train.samples_per_step=0", "at least 1", "samples_per_step=0", "1 or more"),
    Mistake(f"{TASK} --limit 0", "at least 1", "limit=0", "1 or more"),
    Mistake("config check chinese_gpt --set validation_share=1.5", "out of range", "validation_share=1.5", "below 1"),
    # Models and data
    Mistake(HF.replace("--model model", "--model gpt2"), "gpt2 is not a model folder", "no such folder", "hf download"),
    Mistake("score train.jsonl --model modle --yesno", "did you mean 'model'?", "no such folder", "save_pretrained"),
    Mistake("verify train.jsonl", "train.jsonl is not a model folder", "it is a file", "save_pretrained"),
    Mistake(
        HF.replace("model model", "model bare"),
        "the model in bare cannot be loaded",
        "no file named model.safetensors",
        "save it again with save_pretrained (safetensors)",
    ),
    Mistake("score train.jsonl --model silent --yesno", "no tokenizer or processor", "", "save it beside the model"),
    Mistake(HF.replace("causal_lm", "casual_lm"), "did you mean 'causal_lm'?", "task = 'casual_lm'", "change --task"),
    Mistake(
        HF.removesuffix(" --task causal_lm"), "the required key 'task' is missing", "model, data", "--set task=..."
    ),
    Mistake(HF.replace("chats.jsonl", "notes.rtf"), "is in a format that is not supported", "'.rtf'", ".jsonl"),
    Mistake(HF.replace("chats.jsonl", "empty.jsonl"), "holds no samples", "nothing", "check that it is the right file"),
    Mistake(HF.replace("chats.jsonl", "table.jsonl"), "looks like the header of a table", "id,text", "table.csv"),
    Mistake(f"{HF} --validation chats2.jsonl", "did you mean 'chats.jsonl'?", "holds", "check the path"),
    Mistake("plan --lengths lens.txt", "--lengths takes a .npy file", "lens.txt", "truebatch plan lens.txt"),
    # Scoring, runs and the machine
    Mistake("score train.jsonl", "scoring needs a model", "no --model", "--model FOLDER"),
    Mistake("score train.jsonl --model model", "choose one way to read the model", "no readout", "--yesno"),
    Mistake("score train.jsonl --model scripted --labels a,b", "the label 'a' has no value", "a,b", "label=value"),
    Mistake(f"{TASK} --track wandb", "'wandb' is not installed", "wandb", "pip install"),
    Mistake(f"{TASK} --resume required", "no run to resume", "runs/new holds none", "run it without --resume"),
    Mistake(f"{TASK} --resume yes", "--resume does not know this word", "--resume yes", "auto"),
    Mistake(
        TASK.replace("runs/new", "train.jsonl"), "there is a file where the folder should be", "train.jsonl", "another"
    ),
    Mistake(f"{TASK.replace('new', 'numbers')} --set width=4", "width is changed", "width: 8 before, 4 now", "--fresh"),
    Mistake(
        "generate runs/numbers --system task.py:system",
        "does not generate text",
        "runs/numbers",
        "truebatch evaluate runs/numbers",
    ),
    Mistake("evaluate runs/none", "runs/none is not a run", "no config.yaml", "truebatch train"),
    Mistake("run status runs/numbers", "is not a scoring run", "no manifest.json", "folder of a run"),
    Mistake("report train.jsonl", "train.jsonl is not a run", "no settings", "give the folder of a run"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: data, settings, code, a small model, one that lacks things, and a run."""
    place = tmp_path_factory.mktemp("user")
    for name, text in FILES.items():
        (place / name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "tests" / "tasks.py", place / "task.py")
    turns = [{"role": "user", "content": "the boat"}, {"role": "assistant", "content": "the sail"}]
    (place / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    shutil.copytree(_saved(), place / "model")
    shutil.copytree(_saved(), place / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(_saved(), place / "silent", ignore=shutil.ignore_patterns("token*", "chat*"))
    before = Path.cwd()
    os.chdir(place)
    try:
        assert run(TASK.replace("new", "numbers").split()) == 0
    finally:
        os.chdir(before)
    return place


@pytest.fixture(autouse=True)
def surroundings(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(folder / "cache"))
    monkeypatch.setenv("TRUEBATCH_LANG", "en")


def parts(text: str) -> tuple[str, str, str]:
    """The three parts of the last message on stderr."""
    wrong, _, rest = text[text.rindex("error: ") + len("error: ") :].partition("\n  seen: ")
    seen, _, do = rest.partition("\n  do:   ")
    return wrong, seen, do


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.line)
def test_a_mistake_is_answered_with_what_is_wrong_what_was_seen_and_what_to_do(mistake, capsys):
    assert run(mistake.line.split()) == 2
    said = capsys.readouterr().err
    wrong, seen, do = parts(said)
    assert mistake.wrong in wrong
    assert mistake.seen in seen
    assert mistake.do in do
    assert "Traceback" not in said


def test_there_are_forty_and_more():
    assert len({mistake.line for mistake in MISTAKES}) == len(MISTAKES) >= 40


def test_a_device_that_is_not_there_is_named_with_the_way_out(capsys):
    import torch

    device = f"cuda:{torch.cuda.device_count()}"
    assert run(["score", "train.jsonl", "--model", "model", "--labels", "the=1,boat=0", "--device", device]) == 2
    wrong, seen, do = parts(capsys.readouterr().err)
    assert "device does not exist" in wrong
    assert device in seen
    assert "use auto or cpu" in do


def test_a_full_disk_is_said_to_be_full(capsys, tmp_path):
    with armed("checkpoint.file_opened:enospc"):
        assert run([*TASK.replace("runs/new", str(tmp_path / "full")).split()]) == 2
    wrong, _, do = parts(capsys.readouterr().err)
    assert "the disk is full" in wrong
    assert "free some space" in do


def test_a_second_process_on_a_run_is_told_who_owns_it(capsys, tmp_path):
    with open_run(tmp_path / "busy", {"a": 1}):
        assert run([*TASK.replace("runs/new", str(tmp_path / "busy")).split()]) == 2
    wrong, seen, do = parts(capsys.readouterr().err)
    assert "another process owns the run busy" in wrong
    assert f"process {os.getpid()}" in seen
    assert "--out" in do


def test_paths_and_data_in_chinese_with_spaces_work(capsys, tmp_path):
    place = tmp_path / "数据 集"
    place.mkdir()
    (place / "训练 一.jsonl").write_text('{"text": "你好"}\n{"text": "再见了"}\n', encoding="utf-8")
    assert run(["plan", str(place / "训练 一.jsonl"), "--no-cache"]) == 0
    assert "2 samples" in capsys.readouterr().out


def test_a_step_larger_than_the_data_is_one_step_of_all_samples(capsys):
    assert run([*TASK.split(), "--set", "train.samples_per_step=1000", "--dry-run"]) == 0
    rows = dict(line.rsplit(None, 1) for line in capsys.readouterr().out.splitlines() if line[:5] in ("sampl", "steps"))
    assert (rows["samples"], rows["steps"]) == ("6", "1")


def test_a_missing_package_is_named_with_the_command_that_brings_it(capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == "pyarrow":
            raise ImportError("No module named 'pyarrow'")
        return real(name, *rest, **more)

    Path("a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(builtins, "__import__", without)
    assert run(["plan", "a.parquet", "--no-cache"]) == 2
    wrong, seen, do = parts(capsys.readouterr().err)
    assert "needs the package pyarrow" in wrong
    assert "a.parquet" in seen
    assert "pip install 'truebatch[data]'" in do


PYTHON = {
    "a limit of nothing": (lambda: truebatch.PlanConfig(cells=0), "cells"),
    "lengths that are fractions": (lambda: truebatch.build_plan([1.5], truebatch.PlanConfig(cells=8)), "integers"),
    "a kind of field that is none": (lambda: truebatch.Field(name="x", kind="alongg"), "along"),
    "a file that is not there": (lambda: truebatch.measure("missing.jsonl"), "missing.jsonl"),
    "data where a plan is meant": (lambda: truebatch.load_plan("train.jsonl"), "plan"),
    "an array of no kind": (lambda: truebatch.measure(np.array(3)), "length"),
}


@pytest.mark.parametrize("name", PYTHON)
def test_a_mistake_in_python_raises_in_three_parts(name):
    call, word = PYTHON[name]
    with pytest.raises(TruebatchError) as caught:
        call()
    assert word in str(caught.value)
    assert caught.value.seen
    assert caught.value.do
