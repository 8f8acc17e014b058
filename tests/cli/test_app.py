"""The command line as a user meets it: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import truebatch
from truebatch.cli import app
from truebatch.cli.app import run
from truebatch.errors import LawError

FIGURES = {
    "samples", "steps", "micro_batches", "micro_batches_at_least", "tokens", "cells", "fill", "waste", "over_budget",
    "rank_imbalance", "dropped", "plan_seconds",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with data in it, as the current folder."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 120, size=400)
    np.save(tmp_path / "lengths.npy", lengths)
    samples = [{"id": f"s{i}", "input_ids": [1] * int(n), "patches": int(n) % 7} for i, n in enumerate(lengths)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nsamples = [[1] * n for n in range(1, 30)]\n"
        "def lengths():\n    return np.arange(1, 30)\ndef fails():\n    return 1 / 0\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def as_json(capsys, *arguments: str) -> dict:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_promised_figures(folder, capsys):
    row = as_json(capsys, "plan", "train.jsonl", "--cells", "500", "--samples-per-step", "32", "--ranks", "2")
    assert set(row) >= FIGURES
    assert row["samples"] == 400
    assert row["tokens"] == int(np.load("lengths.npy").sum())
    assert row["over_budget"] == row["dropped"] == 0
    assert row["unit"] == "tokens"


def test_a_file_lengths_and_code_with_the_same_samples_give_the_same_plan(folder, capsys):
    options = ("--layout", "packed", "--cells", "300")
    first = as_json(capsys, "plan", "train.jsonl", *options)
    second = as_json(capsys, "plan", "--lengths", "lengths.npy", *options)
    assert {k: first[k] for k in FIGURES - {"plan_seconds"}} == {k: second[k] for k in FIGURES - {"plan_seconds"}}
    code = [as_json(capsys, "plan", f"mine.py:{name}", *options) for name in ("samples", "lengths")]
    assert code[0]["tokens"] == code[1]["tokens"] == sum(range(1, 30))


def test_compare_shows_every_grouping_and_the_next_command_runs(folder, capsys):
    assert run(["plan", "train.jsonl", "--cells", "500", "--compare"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line[:4] in ("fixe", "buck", "budg", "pack")] == [
        "fixed", "bucketed", "budget", "packed",
    ]  # fmt: skip
    (following,) = [line for line in out.splitlines() if line.startswith("next: truebatch ")]
    assert run(following.split()[2:]) == 0
    loaded = truebatch.load_plan("epoch.plan")
    assert loaded.num_samples == 400


def test_compare_with_packed_rows_changes_only_what_padded_rows_cannot_have(folder, capsys):
    plans = as_json(capsys, "plan", "train.jsonl", "--cells", "500", "--rows-per-step", "4", "--compare")
    assert {row["samples"] for row in plans["plans"]} == {400}
    assert all(row["over_budget"] == 0 for row in plans["plans"])


def test_wrong_settings_are_refused_before_anything_is_measured(folder, capsys):
    assert run(["plan", "train.jsonl", "--set", "cels=4", "--compare"]) == 2
    assert run(["plan", "train.jsonl", "--grouping", "fixed"]) == 2
    assert not (folder / "cache").exists()


def test_a_cost_limits_another_field(folder, capsys):
    free = as_json(capsys, "plan", "train.jsonl", "--cells", "500")
    tight = as_json(capsys, "plan", "train.jsonl", "--cells", "500", "--cost", "patches=8")
    assert tight["micro_batches"] > free["micro_batches"]
    assert tight["over_budget"] == 0


def test_flags_win_over_overrides_and_overrides_over_the_file(folder, capsys):
    Path("plan.yaml").write_text("cells: 200\nlayout: packed\nseed: 5\n")
    row = as_json(
        capsys,
        "plan",
        "train.jsonl",
        "--config",
        "plan.yaml",
        "--set",
        "cells=300",
        "--set",
        "seed=6",
        "--cells",
        "400",
    )
    expected = as_json(capsys, "plan", "train.jsonl", "--layout", "packed", "--seed", "6", "--cells", "400")
    assert {k: row[k] for k in FIGURES - {"plan_seconds"}} == {k: expected[k] for k in FIGURES - {"plan_seconds"}}


def test_without_a_limit_one_is_assumed_and_said(folder, capsys):
    assert run(["plan", "train.jsonl"]) == 0
    assert "assuming --cells 8192" in capsys.readouterr().out


def test_dropping_happens_only_when_asked_and_is_counted(folder, capsys):
    assert run(["plan", "train.jsonl", "--cells", "100"]) == 2
    capsys.readouterr()
    row = as_json(capsys, "plan", "train.jsonl", "--cells", "100", "--overlong", "drop")
    assert row["dropped"] == 400 - row["samples"] > 0


WRONG = {
    "plan": "DATA or --lengths",
    "pln": "Did you mean 'plan'",
    "plan train.jsonl --cels 5": "--cells",
    "plan train.jsonl --cells five": "--cells",
    "plan trian.jsonl": "did you mean 'train.jsonl'",
    "plan nothing": "neither a file nor a target",
    "plan train.jsonl --lengths lengths.npy": "DATA or --lengths",
    "plan --lengths train.jsonl": ".npy",
    "plan --lengths nowhere.npy": "no file nowhere.npy",
    "plan mine.py": "mine.py:NAME",
    "plan mine.py:sample": "did you mean 'samples'",
    "plan mine.py:fails": "mine.py:6",
    "plan mine.py:number": "not a dataset",
    "plan mine.py:lengths --field x": "--field x",
    "plan train.jsonl --field tokens": "no field 'tokens'",
    "plan train.jsonl --layout pakced": "did you mean 'packed'",
    "plan train.jsonl --set cels=4": "did you mean 'cells'",
    "plan train.jsonl --set cells": "key=value",
    "plan train.jsonl --config nowhere.yaml": "no file nowhere.yaml",
    "plan train.jsonl --cost patches": "FIELD=LIMIT",
    "plan train.jsonl --cost patch=4": "did you mean 'patches'",
    "plan train.jsonl --compare --save x": "--save x",
    "plan train.jsonl --ranks 0": "ranks",
    "plan train.jsonl --epoch -1": "epoch",
    "plan train.jsonl --tokenizer .": "tokenizer.json",
    "plan train.jsonl --cells 4": "exceed a limit",
    "plan train.jsonl --save nowhere/x": "nowhere/x",
    "plan train.jsonl --cache lengths.npy": "--no-cache",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_gets_three_lines_and_exit_code_2(folder, capsys, line):
    assert run(line.split()) == 2
    error = capsys.readouterr().err
    assert WRONG[line] in error
    assert [text.split(":")[0].strip() for text in error.splitlines() if text[:6] in ("error:", "  seen", "  do: ")] == [
        "error", "seen", "do",
    ]  # fmt: skip
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "array", [np.ones(3), np.array([[1, 2]]), np.array([{}], dtype=object), np.array([1, 0]), np.array([], int)]
)
def test_lengths_that_cannot_be_planned_are_refused(folder, capsys, array):
    np.save("bad.npy", array)
    assert run(["plan", "--lengths", "bad.npy"]) == 2
    assert "  do:" in capsys.readouterr().err


def test_overflowing_lengths_are_named_and_not_a_limit_nobody_gave(folder, capsys):
    np.save("bad.npy", np.array([3, 2**62]))
    assert run(["plan", "--lengths", "bad.npy"]) == 2
    assert "sample 1 has length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (RuntimeError("a surprise"), 70, "a fault of truebatch"),
        (KeyboardInterrupt(), 75, "again"),
        (LawError("not equal", seen="1.0", do="look"), 1, "not equal"),
        (OSError(28, "No space left on device"), 2, "No space left"),
        (MemoryError(), 2, "memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            2,
            "out of memory",
        ),
        (RuntimeError("can't start new thread"), 2, "ulimit"),
        (RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)"), 2, "out of memory"),
    ],
)
def test_every_end_has_its_exit_code(monkeypatch, capsys, error, code, word):
    import torch  # noqa: F401 (its messages are known where it is loaded, as it is where it raises them)

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(app, "_invoke", fail)
    assert run(["plan"]) == code
    quiet = capsys.readouterr().err
    assert word in quiet
    assert "Traceback" not in quiet
    assert run(["plan", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_version_and_help_and_nothing(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"truebatch {truebatch.__version__}\n"
    assert run(["--help"]) == 0
    assert "truebatch demo" in capsys.readouterr().out
    assert run([]) == 2
    assert "Usage" in capsys.readouterr().out


def test_env_as_text_and_as_json(capsys):
    assert run(["env"]) == 0
    assert "python: CPython" in capsys.readouterr().out
    assert as_json(capsys, "env")["packages"]["numpy"] == np.__version__


def start(*arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", "from truebatch.cli.app import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_reader_that_stops_early_causes_no_traceback(folder):
    process = start("plan", "train.jsonl", "--compare")
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(600) == 0


def test_a_terminal_that_cannot_show_chinese_still_gets_the_message(folder):
    Path("坏.yaml").write_text("cells：4\n", encoding="utf-8")
    process = start("plan", "train.jsonl", "--config", "坏.yaml", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    _, error = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "full-width" in error


def test_interrupting_ends_with_75_and_no_traceback(folder):
    Path("slow.py").write_text("import time\nopen('started', 'w').close()\ntime.sleep(600)\n")
    process = start("plan", "slow.py:x")
    deadline = time.monotonic() + 600
    while not Path("started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 75
    assert "Traceback" not in error


def test_a_library_that_finds_no_room_in_the_address_space_is_no_fault_of_ours(monkeypatch, capsys):
    def no_room(*_, **__):
        raise ImportError("x.so: failed to map segment from shared object")

    monkeypatch.setattr("truebatch.cli.commands.score.run_call", no_room)
    assert run(["score", "x.jsonl", "--model", "scripted", "--yesno"]) == 2
    assert "the machine ran out of memory" in capsys.readouterr().err
