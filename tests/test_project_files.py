"""The files people look for beside the code: they parse, and what they name is there."""

from __future__ import annotations

import importlib.util
import re
import tarfile
import zipfile
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


def load_release_check():
    spec = importlib.util.spec_from_file_location("check_release", ROOT / ".github/check_release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_names_one_version_and_a_tag_of_another_is_refused():
    check = load_release_check()
    assert set(check.versions().values()) == {truebatch.__version__}
    assert check.problems_of_tag(f"v{truebatch.__version__}") == []
    assert len(check.problems_of_tag("v99.0.0")) == 3


def test_archives_that_hold_too_little_or_too_much_are_named(tmp_path):
    check = load_release_check()
    with zipfile.ZipFile(tmp_path / "truebatch-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("truebatch/__init__.py", "")
    with tarfile.open(tmp_path / "truebatch-1.tar.gz", "w:gz") as source:
        source.add(ROOT / "README.md", "truebatch-1/README.md")
        source.add(ROOT / "README.md", "truebatch-1/runs/a.log")
    found = check.problems_of_archives(tmp_path)
    assert [problem for problem in found if "the wheel holds" in problem]
    assert "the source archive holds truebatch-1/runs/a.log" in found
    assert "the source archive lacks LICENSE" in found


@pytest.mark.parametrize("file", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda file: file.stem)
def test_a_workflow_has_rights_by_name_and_runs_what_is_there(file):
    flow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert flow["permissions"] == {"contents": "read"}
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    commands = " ".join(step.get("run", "") for step in steps)
    assert [name for name in re.findall(r"[\w./]+\.py|\.ci/run", commands) if not (ROOT / name).is_file()] == []
    targets = re.findall(r"make (\w+)", commands)
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)


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
