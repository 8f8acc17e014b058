"""`truebatch config`: what is shown is what a run would get, what is wrong is named, schemas fit what is accepted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from truebatch.cli.app import _command, run
from truebatch.cli.commands.config import reference
from truebatch.config.load import check_config, config_schema, field_notes
from truebatch.config.yaml_files import Document
from truebatch.planning.config import PlanConfig
from truebatch.plugins import systems
from truebatch.training.registry import find_system
from truebatch.training.system import System
from truebatch.training.train_system import settings_type

SELF_SUFFICIENT = sorted(set(systems()) - {"hf"})
"""Systems that need no setting."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("generator:\n  stays: 7\ntrain:\n  learning_rate: 1e-4\n")
    return tmp_path


def shown(capsys, *arguments: str) -> dict[str, dict]:
    assert run(["config", "show", *arguments, "--json"]) == 0
    return {row["setting"]: row for row in json.loads(capsys.readouterr().out)}


def test_every_setting_says_its_value_and_where_it_comes_from(folder, capsys):
    rows = shown(capsys, "seqset_vae", "--config", "run.yaml", "--set", "train.epochs=3")
    assert rows["generator.stays"]["value"] == 7
    assert rows["generator.stays"]["from"].startswith("run.yaml")
    assert "2" in rows["generator.stays"]["from"]
    assert rows["generator.seed"]["from"] == "default"  # beside a given one, in a section that the file has
    assert rows["train.learning_rate"]["value"] == 1e-4
    assert rows["train.epochs"] == {**rows["train.epochs"], "value": 3, "from": "override 'train.epochs=3'"}
    assert rows["generator.positives"]["about"] == "Share of stays with label 1."


def test_the_table_holds_the_same_settings(folder, capsys):
    rows = shown(capsys, "plan", "--set", "cells=64")
    assert run(["config", "show", "plan", "--set", "cells=64"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[2:]] == list(rows)


@pytest.mark.parametrize("name", SELF_SUFFICIENT)
def test_what_is_shown_can_be_given_back(name, folder, capsys):
    values: dict = {}
    for setting, row in shown(capsys, name).items():
        *sections, key = setting.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = row["value"]
    kind = settings_type(find_system(name))
    assert check_config(kind, Document(values)) == check_config(kind, Document({}))


def test_fine_settings_are_called_fine(folder, capsys):
    assert run(["config", "check", "seqset_vae", "--config", "run.yaml"]) == 0
    assert capsys.readouterr().out == "valid: run.yaml, for seqset_vae\n"


WRONG = {
    "check seqset_vae --set train.epoch=3": "did you mean 'epochs'",
    "check seqset_vae --set generator.stays=many": "generator.stays does not accept",
    "check seqset_vae --config nowhere.yaml": "no file nowhere.yaml",
    "check plan --set layout=pakced": "did you mean 'packed'",
    "check plan --set cells": "key=value",
    "check hf": "'model' is missing",
    "show chinese_gtp": "did you mean 'chinese_gpt'",
    "schema json:loads2": "json",
    "chek plan": "Did you mean 'check'",
    "show plan --sett a=1": "--set",
    "show": "Missing argument",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_gets_three_lines_and_exit_code_2(folder, capsys, line):
    assert run(["config", *line.split()]) == 2
    error = capsys.readouterr().err
    assert WRONG[line] in error
    assert [text.split(":")[0].strip() for text in error.splitlines()] == ["error", "seen", "do"]


def test_a_wrong_line_of_a_file_is_named(folder, capsys):
    Path("bad.yaml").write_text("layout: packed\ncels: 4\n")
    assert run(["config", "check", "plan", "--config", "bad.yaml"]) == 2
    assert "bad.yaml:2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan", *sorted(systems())])
def test_the_schema_names_every_setting_and_what_it_means(name, capsys):
    assert run(["config", "schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    kind = PlanConfig if name == "plan" else settings_type(find_system(name))
    assert schema == config_schema(kind)
    assert schema["additionalProperties"] is False
    notes = field_notes(kind)
    assert {key: about.get("description") for key, about in schema["properties"].items() if key in notes} == notes


def test_notes_of_fields_come_from_the_class_and_its_bases():
    notes = field_notes(settings_type(find_system("hf")))
    assert notes["validation"] == "Samples that are never trained on."
    assert field_notes(System)["config_type"].startswith("A dataclass")


def asked(words: str, cursor: int) -> list[str]:
    """What a shell offers at the cursor."""
    around = {"_TRUEBATCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(cursor)}
    command = [sys.executable, "-c", "from truebatch.cli.app import main; main()"]
    done = subprocess.run(command, env={**os.environ, **around}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_shell_completes_commands_and_options():
    assert asked("truebatch con", 1) == ["config"]
    assert asked("truebatch config sch", 2) == ["schema"]
    assert asked("truebatch train --dry", 2) == ["--dry-run"]


def test_the_script_for_a_shell_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    _command.cache_clear()  # commands that were built before look for the shell of this process
    assert run(["--show-completion", "bash"]) == 0
    assert "_TRUEBATCH_COMPLETE=complete_bash" in capsys.readouterr().out


def test_the_page_of_all_settings_is_what_the_settings_say():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == reference(), "run `truebatch config reference` and keep the page"


def test_the_page_names_what_config_show_shows(folder, capsys):
    named = set(re.findall(r"^\| ([\w.]+) \|", reference(), re.MULTILINE))
    for target in ("plan", "vl_reward", *SELF_SUFFICIENT):
        assert set(shown(capsys, target)) <= named
    assert run(["config", "reference", "--out", "page.md"]) == 0
    assert Path("page.md").read_text(encoding="utf-8") == reference()
