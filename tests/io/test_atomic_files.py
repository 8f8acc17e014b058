"""Names appear only after the bytes behind them are on the disk: what a kill cannot show, the order of calls does."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from truebatch.errors import CheckpointError, DataError
from truebatch.io import atomic_files
from truebatch.io.array_files import read_arrays, write_arrays
from truebatch.io.atomic_files import (
    atomic_folder,
    atomic_text,
    read_json,
    remove_drafts,
    sync_folder,
    write_json,
    write_text,
)
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.plan_file import load_plan, save_plan
from truebatch.scoring.store.export import write_rows
from truebatch.testing.failpoints import FAILPOINTS, armed
from truebatch.training.checkpoint.store import Checkpoint, load_checkpoint, save_checkpoint

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """What was synced, renamed and deleted, in order, by the last part of its path."""
    seen: list[tuple[str, str]] = []

    def watch(module, name, path_of):
        real = getattr(module, name)

        def call(*arguments, **options):
            seen.append((name, path_of(arguments[0])))
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    watch(os, "fsync", lambda handle: Path(os.readlink(f"/proc/self/fd/{handle}")).name)
    watch(Path, "rename", lambda path: path.name)
    watch(Path, "replace", lambda path: path.name)
    watch(shutil, "rmtree", lambda path: Path(path).name)
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the names of open files")
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_old_ones_go_after_that(tmp_path, calls):
    save_checkpoint(tmp_path, Checkpoint(1, {"model": {"w": torch.ones(3)}}), keep=1)
    calls.clear()
    save_checkpoint(tmp_path, Checkpoint(2, {"model": {"w": torch.ones(3)}, "rng": {"x": torch.ones(1)}}), keep=1)
    stage = next(name for what, name in calls if what == "rename")
    assert stage.startswith(".stage-2-")
    pruned = calls[-1][1]
    assert calls == [
        ("fsync", "model.safetensors"), ("fsync", "rng.safetensors"), ("fsync", "values.json"), ("fsync", "manifest.json"),
        ("fsync", stage), ("rename", stage), ("fsync", tmp_path.name), ("rename", "step-1"), ("rmtree", pruned),
    ]  # fmt: skip
    assert pruned.startswith(".pruned-step-1-")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the names of open files")
def test_a_small_file_is_on_the_disk_before_it_has_its_name(tmp_path, calls):
    write_text(tmp_path / "状态.json", "x")
    draft = calls[0][1]
    assert calls == [("fsync", draft), ("replace", draft), ("fsync", tmp_path.name)]
    assert os.listdir(tmp_path) == ["状态.json"]


@pytest.mark.parametrize("name", [name for name in FAILPOINTS if name.startswith("write.")])
def test_a_failed_write_leaves_the_old_text_or_the_new_and_no_draft(tmp_path, name):
    write_text(tmp_path / "a", "old")
    with armed(f"{name}:eio"), pytest.raises(OSError, match="failpoint"):
        write_text(tmp_path / "a", "new, and longer")
    is_renamed = name in ("write.renamed", "write.folder_synced")
    assert (tmp_path / "a").read_text() == ("new, and longer" if is_renamed else "old")
    assert os.listdir(tmp_path) == ["a"]


WRITERS = {
    "text.csv": lambda path, value: _write_lines(path, value),
    "arrays.npz": lambda path, value: write_arrays(path, {"x": np.full(3, value)}, {}),
    "a.plan": lambda path, value: save_plan(build_plan([value], PlanConfig(cells=64)), path),
    "scores.jsonl": lambda path, value: write_rows([{"index": value}], path),
}


def _write_lines(path, value):
    with atomic_text(path) as file:
        file.write(f"a\r\n{value}\n")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("point", ["write.opened", "write.written", "write.synced"])
def test_whatever_is_written_is_the_old_or_the_new(tmp_path, name, point):
    write, path = WRITERS[name], tmp_path / name
    write(path, 5)
    before = path.read_bytes()
    with armed(f"{point}:enospc"), pytest.raises((OSError, DataError), match="failpoint"):
        write(path, 7)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, [name])
    write(path, 7)
    assert path.read_bytes() != before
    assert os.listdir(tmp_path) == [name]


def test_what_was_written_is_read_again(tmp_path):
    for name, write in WRITERS.items():
        write(tmp_path / name, 6)
    assert (tmp_path / "text.csv").read_bytes() == b"a\r\n6\n"
    assert read_arrays(tmp_path / "arrays.npz")[0]["x"].tolist() == [6, 6, 6]
    assert load_plan(tmp_path / "a.plan").num_samples == 1
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in WRITERS} == {0o666 & ~_umask()}


def _umask():
    value = os.umask(0)
    os.umask(value)
    return value


@pytest.mark.parametrize("point", ["folder.written", "folder.old_removed"])
def test_a_folder_is_never_half_of_one(tmp_path, point):
    target = tmp_path / "model"
    _write_folder(target, "old")
    with armed(f"{point}:eio"), pytest.raises(OSError, match="failpoint"):
        _write_folder(target, "new")
    assert os.listdir(tmp_path) == (["model"] if point == "folder.written" else [])
    _write_folder(target, "new")
    assert (target / "a").read_text() == "new"
    assert os.listdir(tmp_path) == ["model"]


def test_of_two_that_write_a_folder_to_be_kept_the_first_wins(tmp_path):
    target = tmp_path / "model"
    with atomic_folder(target, keep_existing=True) as late:
        (late / "a").write_text("late")
        with atomic_folder(target, keep_existing=True) as early:
            (early / "a").write_text("early")
    assert (target / "a").read_text() == "early"
    assert os.listdir(tmp_path) == ["model"]


def test_a_file_where_the_folder_should_be_is_an_error(tmp_path):
    (tmp_path / "model").write_text("a file")
    with pytest.raises(NotADirectoryError), atomic_folder(tmp_path / "model", keep_existing=True):
        pass
    assert os.listdir(tmp_path) == ["model"]


def _write_folder(target, text):
    with atomic_folder(target) as draft:
        (draft / "a").write_text(text)


def test_drafts_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    for name in (".a.1234.part", "b.part", ".lock", "c"):
        (tmp_path / name).write_text("")
    remove_drafts(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", "b.part", "c"]


def test_json_is_strict_both_ways(tmp_path):
    write_json(tmp_path / "a", {"路": 1.5})
    assert read_json(tmp_path / "a") == {"路": 1.5}
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "a", float("nan"))
    (tmp_path / "b").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not JSON"):
        read_json(tmp_path / "b")
    with pytest.raises(DataError, match="too large"):
        read_json(tmp_path / "b", max_bytes=10)


def test_a_filesystem_that_cannot_sync_folders_is_accepted_and_a_broken_one_is_not(tmp_path, monkeypatch):
    def fail(handle: int) -> None:
        raise OSError(number, "planted")

    monkeypatch.setattr(atomic_files.os, "fsync", fail)
    number = atomic_files.errno.EINVAL
    sync_folder(tmp_path)
    number = atomic_files.errno.EIO
    with pytest.raises(OSError, match="planted"):
        sync_folder(tmp_path)


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*/step-*")), ids=lambda folder: folder.parent.name)
def test_checkpoints_of_every_released_version_are_read(folder):
    """The folder's name is the version that wrote it; one is added with each release that changes the format."""
    parts = load_checkpoint(folder).parts
    assert torch.equal(parts["model"]["层.weight"], torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    assert parts["progress"] == {"epoch": 2, "best": float("inf"), "pair": (1, "二")}
    assert parts["model"]["tied"] is parts["model"]["层.weight"]


def test_there_is_a_golden_checkpoint():
    assert list(GOLDEN.glob("*/step-*"))
