"""A package of somebody else brings a system and a command, installed as pip would install it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULE = '''
from dataclasses import dataclass

from truebatch import Field, System, Task, TrainData
from truebatch.cli.system_commands import SystemCommand


@dataclass(frozen=True)
class Numbers:
    number: int = 3
    """How many samples there are."""


def show_numbers() -> int:
    """Count the samples."""
    print("three numbers")
    return 0


def prepare(config: Numbers) -> Task:
    samples = [{"x": [1.0] * (i + 1)} for i in range(config.number)]
    data = TrainData(samples=samples, fields=[Field(name="x")])
    return Task(data=data, build_model=lambda: None, objective=None)


NUMBERS = System(name="numbers", config_type=Numbers, prepare=prepare)
COMMAND = SystemCommand(show_numbers, "Numbers, counted.")
'''


@pytest.fixture
def installed(tmp_path):
    """A folder on the path with a module and the metadata that pip writes beside it."""

    def install(package: str, **groups: str) -> Path:
        about = tmp_path / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[truebatch.{group}]\n{line}\n" for group, line in groups.items()]
        (about / "entry_points.txt").write_text("\n".join(lines))
        (tmp_path / "numbers_system.py").write_text(MODULE)
        return tmp_path

    return install


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}", "TRUEBATCH_LANG": "en"}
    return subprocess.run(
        [sys.executable, "-m", "truebatch", *words], env=env, capture_output=True, text=True, check=False, cwd=folder
    )


def test_an_installed_package_brings_a_system_and_a_command(installed):
    folder = installed(
        "numbers", systems="numbers = numbers_system:NUMBERS", commands="numbers = numbers_system:COMMAND"
    )
    shown = ran(folder, "config", "show", "numbers")
    assert shown.returncode == 0, shown.stderr
    assert "number " in shown.stdout
    assert "Numbers, counted." in ran(folder, "--help").stdout
    counted = ran(folder, "numbers")
    assert (counted.returncode, counted.stdout) == (0, "three numbers\n")


def test_a_command_that_cannot_be_imported_is_named_and_the_others_work(installed):
    folder = installed("broken", commands="numbers = no_such_module:COMMAND")
    shown = ran(folder, "config", "check", "plan", "--set", "cells=64")
    assert shown.returncode == 0
    assert "no_such_module" in shown.stderr


def test_two_packages_with_one_name_are_refused(installed):
    folder = installed("twice", systems="chinese_gpt = numbers_system:NUMBERS")
    shown = ran(folder, "config", "show", "chinese_gpt")
    assert shown.returncode == 2
    assert "numbers_system:NUMBERS" in shown.stderr
    assert "uninstall one" in shown.stderr


def test_a_source_tree_without_metadata_knows_its_systems(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom truebatch.plugins import systems\nprint(*sorted(systems()))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(SOURCE)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["chinese_gpt", "hf", "seqset_vae", "stitched_llm", "vlm_pruning"]


PAGE = (SOURCE.parent / "docs/plugins.md").read_text(encoding="utf-8")
"""The page about such packages: its example is the package that is installed here."""


def write_example(folder: Path) -> dict[str, list[str]]:
    """The files of the page's package, and its entry points as a build backend takes them from pyproject.toml."""
    for code in re.findall(r"```python\n(# (?:\w+\.py)\n.*?)```", PAGE, flags=re.DOTALL):
        (folder / code.split()[1]).write_text(code, encoding="utf-8")
    project = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)[1])
    modules = project["tool"]["setuptools"]["py-modules"]
    assert {f"{name}.py" for name in modules} == {file.name for file in folder.iterdir()}
    points = project["project"]["entry-points"]
    return {group: [f"{name} = {target}" for name, target in named.items()] for group, named in points.items()}


def make_wheel(folder: Path, groups: dict[str, list[str]]) -> Path:
    """The wheel that a build backend makes of the page's package, made here without one: backends are downloaded."""
    about, wheel = "counting-1.0.dist-info", folder / "counting-1.0-py3-none-any.whl"
    points = "\n".join("\n".join([f"[{group}]", *lines, ""]) for group, lines in groups.items())
    files = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.py")} | {
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": points,
    }
    with ZipFile(wheel, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
        packed.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"]))
    return wheel


def test_the_package_of_the_page_is_installed_by_pip_and_its_commands_run(tmp_path):
    pytest.importorskip("pip", reason="pip is not installed")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    wheel = make_wheel(source, write_example(source))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    lines = re.search(r"```sh\n(truebatch train counting .*?)```", PAGE, flags=re.DOTALL)[1].splitlines()
    trained, shown, counted = (ran(site, *line.split()[1:]) for line in lines)
    assert trained.returncode == 0, trained.stderr
    assert (site / "runs/counting").is_dir()
    assert "num_samples" in shown.stdout
    assert (counted.returncode, counted.stdout) == (0, "0 1\n1 2 3\n")


def test_the_system_of_the_page_is_trained_from_its_file_without_any_metadata(tmp_path):
    write_example(tmp_path)
    [line] = re.findall(r"^truebatch (train counting_system.py.*)$", PAGE, flags=re.MULTILINE)
    done = ran(tmp_path, *line.split())
    assert done.returncode == 0, done.stderr
