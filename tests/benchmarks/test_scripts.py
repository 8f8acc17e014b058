"""Files of benchmarks/ as commands: all of them are there, options reach them, and their absence is said."""

from __future__ import annotations

import json
import shlex

import pytest

from benchmarks.cli import SCRIPTS
from benchmarks.cli import run as run_benchmarks
from benchmarks.harness.command_line import command_line
from benchmarks.harness.script import FOLDER
from truebatch.cli.app import run


def test_every_file_is_a_command_and_every_command_a_file():
    assert {file.stem for file in FOLDER.glob("[!_]*.py")} == set(SCRIPTS)


LIGHT = ("planning", "reliability")
"""Files that import no torch; the others take seconds to say their options."""


@pytest.mark.parametrize(
    "name", [name if name in LIGHT else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]
)
def test_help_answers_without_running_the_file(name, capfd):
    assert run_benchmarks([name, "--help"]) == 0
    shown = capfd.readouterr().out
    assert "--out" in shown


def test_options_reach_the_file_and_the_json_says_how_it_was_made(tmp_path):
    out = tmp_path / "attention.json"
    sizes = ["--cells", "128", "--segments", "4", "--heads", "2", "--kv-heads", "2", "--head-size", "8"]
    assert run_benchmarks(["attention", "--json", str(out), *sizes, "--repeats", "1"]) in (0, 1)  # 1: so small, no gain
    kept = json.loads(out.read_text())
    assert kept["config"]["cells"] == 128
    assert {"command", "date", "hardware"} <= set(kept)


@pytest.mark.parametrize("name", ["training", "attention", "census"])
def test_a_folder_for_the_json_is_refused_before_anything_is_measured(name, tmp_path, capfd):
    command = run if name == "census" else run_benchmarks
    assert command([name, "--json", str(tmp_path)]) == 2
    said = capfd.readouterr()
    assert "is a directory" in said.err
    assert not said.out


def test_the_files_own_refusal_is_the_exit_code(capfd):
    assert run_benchmarks(["attention", "--cels", "4"]) == 2
    assert "--cels" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("benchmarks/__main__.py training --json a.json", "python -m benchmarks training --json a.json"),
        ("training.py --out 'a b.json'", "python -m benchmarks.training.run --out 'a b.json'"),
    ],
)
def test_the_command_that_is_kept_is_the_one_that_was_typed(monkeypatch, typed, kept):
    monkeypatch.setattr("sys.argv", shlex.split(typed))
    assert command_line("benchmarks.training.run") == kept
