"""A package of somebody else brings a system and a command, installed as pip would install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULE = '''
from dataclasses import dataclass

from truebatch import Field, System, measure
from truebatch.cli.system_commands import SystemCommand


@dataclass(frozen=True)
class Numbers:
    number: int = 3
    """How many samples there are."""


def show_numbers() -> int:
    """Count the samples."""
    print("three numbers")
    return 0


NUMBERS = System(
    name="numbers",
    config_type=Numbers,
    load=lambda config: [{"x": [1.0] * (i + 1)} for i in range(config.number)],
    fields=lambda config: [Field(name="x")],
    measure=lambda config, samples: measure(samples, field="x"),
    build_model=lambda config: None,
    objective=lambda config: None,
)
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
