"""The pytest plugin, the GitHub Action and the example repository, run as their users run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.hf.finetune.folders import model_folder

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verified_model"
ACTION = ROOT / ".github" / "actions" / "verify" / "action.yml"
BROKEN = "    return {'logits': head(words(ids).mean(1))}\n"


def package(folder: Path) -> Path:
    """truebatch as pip installs it, for importlib.metadata: the entry points that pyproject.toml declares."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    about = folder / "site" / "truebatch_plugin-0.dist-info"
    about.mkdir(parents=True)
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: truebatch-plugin\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    about.joinpath("entry_points.txt").write_text("[pytest11]\n" + "\n".join(lines) + "\n")
    return about.parent


@pytest.fixture
def example(tmp_path):
    """A copy of the example, where nothing of this repository but the package is found."""
    copy = tmp_path / "example"
    shutil.copytree(EXAMPLE, copy)
    return copy


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(package(folder)), str(ROOT / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def break_model(folder: Path) -> None:
    file = folder / "model.py"
    before, _, rest = file.read_text().partition("    is_real")
    file.write_text(before + BROKEN + "\n\ndef question" + rest.partition("def question")[2])


def test_the_fixture_and_the_option_prove_the_example(example):
    done = pytest_in(example, "--truebatch", "model.py:question", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert "truebatch[model.py:question] PASSED" in done.stdout


@pytest.mark.slow
def test_a_broken_model_fails_both_with_the_report(example):
    break_model(example)
    done = pytest_in(example, "--truebatch", "model.py:question")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed" in done.stdout
    assert done.stdout.count("BROKEN: a sample's result depends on its micro-batch") >= 2
    assert "likely cause" in done.stdout


@pytest.mark.slow
def test_a_model_folder_is_one_more_test_and_a_wrong_target_is_named(example):
    model_folder(example / "llama")
    (example / "test_model.py").unlink()
    done = pytest_in(example, "--truebatch", "llama", "--truebatch", "nowhere.py:model")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "nowhere.py" in done.stdout
    assert "Traceback" not in done.stdout


def steps() -> list[dict]:
    return yaml.safe_load(ACTION.read_text())["runs"]["steps"]


def run_action(folder: Path, target: str, arguments: str = "") -> tuple[int, str, str]:
    """The last step of the action in a shell, as a runner runs it: bash -eo pipefail."""
    summary = folder / "summary.md"
    summary.touch()
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GITHUB_STEP_SUMMARY": str(summary),
        "TRUEBATCH_TARGET": target, "TRUEBATCH_ARGUMENTS": arguments,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps()[-1]["run"]]
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    return done.returncode, summary.read_text(), done.stdout + done.stderr


def test_the_action_is_a_composite_one_whose_inputs_reach_the_shell_as_variables_only():
    action = yaml.safe_load(ACTION.read_text())
    assert {"name", "description", "inputs", "runs"} == set(action)
    assert action["runs"]["using"] == "composite"
    for step in steps():
        assert set(step) <= {"name", "if", "uses", "with", "shell", "env", "run"}
        assert ("uses" in step) != ("run" in step and "shell" in step)
        assert "${{" not in step.get("run", ""), "an input in a script could be any command"
    for given in action["inputs"].values():
        assert set(given) <= {"description", "required", "default"}
    asked = yaml.safe_load((EXAMPLE / ".github/workflows/batchable.yml").read_text())["jobs"]["verify"]["steps"][-1]
    assert set(asked["with"]) <= set(action["inputs"])
    assert "/".join(asked["uses"].partition("@")[0].split("/")[2:]) == str(ACTION.parent.relative_to(ROOT))


def test_the_action_writes_the_table_and_fails_with_the_verdict(example):
    code, summary, out = run_action(example, "model.py:question", "--quick\n")
    assert code == 0, out
    assert summary.startswith("### `model.py:question`\n\n**EQUAL")
    assert summary.count("\n| `=` | ") >= 3
    break_model(example)
    code, more, out = run_action(example, "model.py:question")
    assert code == 1, out
    assert more.startswith(summary), "a summary is added to"
    assert "**BROKEN" in more
    assert "| `x` | " in more
    assert "- likely cause: " in more
    code, _, out = run_action(example, "model.py:question; echo no $(id)")
    assert code == 2
    assert "uid=" not in out
