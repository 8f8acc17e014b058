"""The public names: few, sorted, loaded on first use, and free of torch where nothing needs it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import truebatch

HEAVY = ("torch", "transformers", "accelerate", "numba")


def loaded_after(code: str) -> set[str]:
    """Top-level packages loaded by a fresh interpreter that runs the code."""
    script = textwrap.dedent(code) + "\nimport sys; print('LOADED', *{m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_names_are_sorted_complete_and_few():
    names = truebatch.__all__
    assert names == sorted(set(names))
    assert len(names) <= 36
    assert set(names) <= set(dir(truebatch))
    for name in names:
        assert getattr(truebatch, name) is not None


def test_no_public_name_is_the_name_of_a_file_or_room_beside_it():
    # Importing such a file would put the module in the place of the name.
    beside = {path.stem for path in Path(truebatch.__file__).parent.iterdir()}
    assert not beside & set(truebatch.__all__)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="build_plan"):
        _ = truebatch.build_plans


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_after("import truebatch") & {*HEAVY, "numpy", "pydantic", "yaml", "rich"}


def test_help_loads_nothing_heavy():
    loaded = loaded_after("from truebatch.cli.app import run; assert run(['--help']) == 0")
    assert not loaded & {*HEAVY, "pydantic", "numpy", "yaml"}
    # typer itself asks pydantic about the types of options when it describes them.
    loaded = loaded_after("from truebatch.cli.app import run; assert run(['plan', '--help']) == 0")
    assert not loaded & {*HEAVY, "numpy", "yaml"}


def test_planning_never_loads_torch():
    loaded = loaded_after("""
        import truebatch
        truebatch.build_plan([3, 1, 2], truebatch.PlanConfig(cells=8))
        from truebatch.cli.app import run
        import json, pathlib, tempfile
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "a.jsonl").write_text(json.dumps({"text": "abc"}) * 1)
        assert run(["plan", str(folder / "a.jsonl"), "--compare", "--no-cache"]) == 0
        assert run(["plan", str(folder / "a.jsonl"), "--json", "--no-cache", "--save", str(folder / "p")]) == 0
    """)
    assert not loaded & {"torch", "transformers", "accelerate"}


def test_a_judge_that_is_no_model_folder_does_not_wait_for_transformers():
    loaded = loaded_after("""
        from truebatch.cli.app import run
        import json, pathlib, tempfile
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "a.jsonl").write_text(json.dumps({"user": "score=1"}))
        asked = ["score", str(folder / "a.jsonl"), "--yesno", "--model"]
        assert run([*asked, "scripted", "--out", str(folder / "run")]) == 0
    """)
    assert not loaded & {"transformers", "accelerate"}
