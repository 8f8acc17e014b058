"""The files people look for beside the code: they parse, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import truebatch
from truebatch.cli.app import run

ROOT = Path(__file__).parents[1]
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_citation_names_this_version_and_licence():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == truebatch.__version__
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert {"cff-version", "title", "message", "authors"} <= set(cited)


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_an_issue_template_is_one_in_both_languages(file):
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert {"name", "description", "labels", "body"} <= set(form)
    labels = [form["name"], *(part["attributes"]["label"] for part in form["body"])]
    assert all(re.search(r"[\u4e00-\u9fff]|`", label) for label in labels)
    for page in re.findall(r"docs/[\w.-]+\.md", file.read_text(encoding="utf-8")):
        assert (ROOT / page).is_file()


def test_there_is_a_template_for_bugs_wrong_batches_and_questions():
    assert {file.stem for file in TEMPLATES} == {"bug", "question", "wrong_batch"}


def test_files_that_contributors_are_sent_to_exist():
    named = re.findall(r"`((?:src|tests|planning|scoring|batch|systems)/[\w/]+\.py)`", CONTRIBUTING)
    assert len(named) >= 6
    named = [name.replace("NAME", "chinese_gpt") for name in named]
    assert [name for name in named if not ((ROOT / name).exists() or (ROOT / "src/truebatch" / name).exists())] == []


def test_names_that_contributors_are_sent_to_exist():
    for name, file in {
        "describe_readout": "scoring/readouts/__init__.py",
        "as_labels": "scoring/readouts/__init__.py",
        "Grouping": "planning/config.py",
        "grouping": "planning/pack_epoch.py",
    }.items():
        assert name in (ROOT / "src/truebatch" / file).read_text(encoding="utf-8")


def test_limits_of_style_are_those_that_are_tested():
    order = (ROOT / "tests/test_architecture.py").read_text(encoding="utf-8")
    assert "none over sixty" in CONTRIBUTING
    assert "> 60" in order
    assert "none over 400" in CONTRIBUTING
    assert "> 400" in order


@pytest.mark.parametrize(
    "command",
    sorted(set(re.findall(r"`truebatch (\w+)(?:[ |`])", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))),
)
def test_commands_of_the_changelog_exist(command, capsys):
    assert run([command, "--help"]) == 0
