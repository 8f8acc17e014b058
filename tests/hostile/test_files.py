"""Hostile files: no code is run, no traceback, no hang; three parts that name the file, and the exit code of the documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.data_files import DATA
from tests.hostile.making import CANARY, Hostile
from tests.hostile.model_folders import MODELS
from tests.hostile.run_folders import RUNS
from tests.hostile.settings_files import SETTINGS
from tests.hostile.system_files import SYSTEMS
from truebatch.cli.app import run
from truebatch.errors import TruebatchError, exit_code_of

CASES = [*SETTINGS, *DATA, *RUNS, *MODELS, *SYSTEMS]
_heard: list[tuple[str, tuple[object, ...]]] = []
_listening = [False]


def _hear(event: str, details: tuple[object, ...]) -> None:
    if _listening[0] and event in ("pickle.find_class", "socket.connect", "os.system", "subprocess.Popen", "os.exec"):
        _heard.append((event, details))


sys.addaudithook(_hear)  # Cannot be taken back: it listens only while a case runs.


@pytest.fixture
def heard() -> Iterator[list[tuple[str, tuple[object, ...]]]]:
    """Pickles that look a function up, connections and processes, while a case runs."""
    _heard.clear()
    _listening[0] = True
    yield _heard
    _listening[0] = False


def meet(case: Hostile, folder: Path) -> int:
    """Run the command, or call the reader and tell its error as the command line would."""
    what = case.make(folder)
    if not callable(what):
        return run(list(what))
    with pytest.raises(TruebatchError) as caught:
        what()
    error = caught.value
    sys.stderr.write(f"error: {error.wrong}\n  seen: {error.seen}\n  do:   {error.do}\n")
    return exit_code_of(error)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_file_is_refused_in_three_parts_and_runs_nothing(case, tmp_path, monkeypatch, capsys, heard):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRUEBATCH_LANG", "en")
    code = meet(case, tmp_path)
    out, err = capsys.readouterr()
    assert code == case.code, err
    assert not (tmp_path / CANARY).exists()
    assert not [one for one in heard if one[0] != "pickle.find_class" or one[1][0] in ("posix", "os", "builtins")]
    assert "Traceback" not in err
    assert "\x1b" not in out + err, "an escape reaches the terminal"
    said = out + err
    if code == 2:
        assert err.startswith("error: ")
        assert "\n  seen: " in err
        assert "\n  do:   " in err
    assert case.says in said
    assert len(said) < 4000


def test_there_are_many():
    assert len({case.name for case in CASES}) == len(CASES) >= 40
