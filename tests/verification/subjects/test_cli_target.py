"""`truebatch verify` as a person types it."""

import json

import pytest

from truebatch.cli.app import run
from truebatch.testing.tiny_hf.model import tiny_model

MINE = """
import torch
from torch import nn

torch.manual_seed(0)
words, head = nn.Embedding(20, 8), nn.Linear(8, 2)
samples = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 1], [3, 4, 5, 6]]


def single(sample):
    return {"logits": head(words(torch.tensor(sample)).mean(0))}


def padded(chosen):
    ids = nn.utils.rnn.pad_sequence([torch.tensor(s) for s in chosen], batch_first=True)
    return ids, (ids > 0)[..., None]


def wrong(chosen):
    return {"logits": head(words(padded(chosen)[0]).mean(1))}


def right(chosen):
    ids, real = padded(chosen)
    return {"logits": head((words(ids) * real).sum(1) / real.sum(1))}


def broken():
    raise RuntimeError("the file of the weights is gone")


def setup():
    return {"subject": right, "one": single, "samples": samples}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(capsys, *arguments):
    code = run(["verify", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_two_functions_of_a_file(here, capsys):
    arguments = ["--one", "mine.py:single", "--samples", "mine.py:samples"]
    code, out, _ = ask(capsys, "mine.py:right", *arguments)
    assert (code, out.splitlines()[0][:5]) == (0, "EQUAL")
    code, out, _ = ask(capsys, "mine.py:wrong", *arguments)
    assert (code, out.splitlines()[0][:6]) == (1, "BROKEN")
    assert "likely cause:" in out


def test_a_function_that_sets_everything_up(here, capsys):
    assert ask(capsys, "mine.py:setup")[0] == 0


def test_json_for_machines(here, capsys):
    code, out, _ = ask(capsys, "mine.py:wrong", "--one", "mine.py:single", "--samples", "mine.py:samples", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["verdict"] == "broken"
    assert {a["name"] for a in found["arrangements"]} >= {"alone", "right padded", "cut in two"}
    assert found["causes"]


def test_a_model_folder_needs_nothing_else(here, capsys):
    tiny_model("llama").save_pretrained(here / "模型 a")
    code, out, _ = ask(capsys, str(here / "模型 a"))
    assert (code, out.splitlines()[0][:5]) == (0, "EQUAL")
    code, out, _ = ask(capsys, str(here / "模型 a"), "--layout", "packed")
    assert code == 0
    assert "left padded" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing-here"], "is not a model folder"),
        (["mine.py:nothing"], "nothing"),
        (["mine.py:right"], "verify needs samples"),
        (["mine.py:broken"], "the file of the weights is gone"),
        (["mine.py:right", "--samples", "mine.py:samples", "--layout", "sideways"], "unknown layout"),
        (["mine.py:right", "--samples", "mine.py:samples", "--tolerance", "-1"], "tolerance"),
        (["mine.py:right", "--samples", "mine.py:samples", "--rows", "1"], "2 or more"),
        (["mine.py:right", "--samples", "mine.py:samples", "--longest", "900"], "cannot be made longer"),
    ],
)
def test_a_wrong_question_gets_three_lines_and_exit_code_2(here, capsys, arguments, words):
    code, out, err = ask(capsys, *arguments)
    assert code == 2, out + err
    assert words in err
    assert "seen:" in err
    assert "do:" in err
    assert "Traceback" not in err


def test_a_damaged_model_folder_is_named(here, capsys):
    folder = here / "model"
    tiny_model("llama").save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    code, _, err = ask(capsys, str(folder))
    assert code == 2
    assert "cannot be loaded" in err


def test_the_sizes_and_the_thoroughness_asked_for_are_those_of_the_proof(here, capsys):
    folder = str(here / "model")
    tiny_model("llama").save_pretrained(folder)
    code, out, _ = ask(capsys, folder, "--quick", "--rows", "11", "--longest", "90", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["coverage"]["rows"], found["coverage"]["longest"]) == (11, 90)
    assert {a["name"] for a in found["arrangements"]} == {"right padded", "cut in pairs", "packed"}
