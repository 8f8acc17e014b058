"""The shape of the source: layers hold, every plugin table says the same, files and functions stay readable.

Files are read, not imported: a wrong import is then named here and does not crash as a circular import first.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from truebatch import plugins
from truebatch_systems import ENTRY_POINTS

REPOSITORY = Path(__file__).parents[1]
SOURCES = REPOSITORY / "src"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
NEVER_FILES = {"utils", "common", "helpers", "base", "core", "manager", "misc"}
LATE = ("truebatch.cli", "truebatch.plugins")
"""Where the own package may be imported inside of functions, beside the command lines of systems."""


@cache
def modules() -> dict[str, Path]:
    """Every file of both packages by its dotted name."""
    files = (file for file in SOURCES.rglob("*.py"))
    return {".".join(file.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def linted(folder: Path) -> subprocess.CompletedProcess[str]:
    """The contracts of pyproject.toml, kept by the packages of a folder or not."""
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(cache_dir=None))"
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder / 'src')!r}); {code}"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_layers_hold_and_a_planted_upward_import_is_named(tmp_path):
    pytest.importorskip("importlinter")
    kept = linted(REPOSITORY)
    assert kept.returncode == 0, kept.stdout
    shutil.copytree(SOURCES, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    with (tmp_path / "src/truebatch/planning/plan.py").open("a", encoding="utf-8") as file:
        file.write("from truebatch.training.step import StepEngine\n")
    broken = linted(tmp_path)
    assert broken.returncode == 1
    assert "truebatch.planning.plan -> truebatch.training.step" in broken.stdout


def test_both_tables_of_plugins_say_the_same():
    declared = PROJECT["project"]["entry-points"]
    for group in plugins.GROUPS:
        ours = {name: target for name, target in plugins.OWN.get(group, {}).items() if name != "plan"}
        assert declared[f"truebatch.{group}"] == {**ours, **ENTRY_POINTS[group]}


@pytest.mark.parametrize("group", plugins.GROUPS)
def test_every_plugin_can_be_loaded(group):
    for target in plugins._targets(group).values():
        assert plugins.load_plugin(target) is not None


def test_no_import_is_relative():
    relative = [
        name
        for name, file in modules().items()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_only_commands_import_their_own_package_inside_functions():
    late = [
        f"{name} -> {node.module}"
        for name, file in modules().items()
        if not name.startswith(LATE) and not name.endswith((".cli", ".demo_command"))
        for function in ast.walk(tree(file))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("truebatch")
    ]
    assert not late


def test_files_are_named_for_what_they_hold_and_stay_readable():
    assert not NEVER_FILES & {name.rpartition(".")[2] for name in modules()}
    long = {name: n for name, file in modules().items() if (n := len(file.read_text().splitlines())) > 400}
    assert not long


def test_a_folder_is_seen_at_a_glance():
    folders = {file.parent for file in modules().values()}
    most = {"commands": 24}  # one file per command, named as it is typed
    sizes = {folder: len([*folder.glob("*.py")]) - 1 for folder in folders}
    many = {str(folder): n for folder, n in sizes.items() if n > most.get(folder.name, 15)}
    assert not many


def test_a_class_name_stands_once():
    found: dict[str, list[str]] = {}
    for name, file in modules().items():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_function_is_longer_than_a_page():
    long = [
        f"{name}.{node.name}: {length} lines"
        for name, file in modules().items()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef) and (length := (node.end_lineno or 0) - node.lineno + 1) > 60
    ]
    assert not long


OWN_WAYS = {
    "truebatch.io.atomic_files": "the writer itself",
    "truebatch.training.checkpoint.store": "a stage folder becomes a checkpoint",
    "truebatch.training.checkpoint.retention": "old checkpoints are set aside before they are deleted",
    "truebatch.training.run_dir.run_dir": "an earlier run makes room",
    "truebatch.cli.commands.score": "an earlier run makes room",
    "truebatch.testing.drills.kill_drill": "a broken state is laid out on purpose",
}
"""Who renames; all others write through the one writer."""
RENAMING = re.compile(r"\bos\.(replace|rename)\(|\.rename\(|\b(mkstemp|mkdtemp|NamedTemporaryFile)\(")


def test_there_is_one_writer_of_whole_files():
    assert {name for name, file in modules().items() if RENAMING.search(file.read_text(encoding="utf-8"))} == set(
        OWN_WAYS
    )
