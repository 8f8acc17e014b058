"""Checkpoints are there whole or not at all; a damaged one is never loaded, a good one never lost."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from truebatch.errors import CheckpointError
from truebatch.io import atomic_files
from truebatch.testing.failpoints import ERRORS, armed, recorded
from truebatch.training.checkpoint.manifest import Best, manifest_text, read_manifest
from truebatch.training.checkpoint.retention import (
    best_step,
    clean_leftovers,
    discard_after,
    list_checkpoints,
    mark_best,
    mend_best,
)
from truebatch.training.checkpoint.store import Checkpoint, load_checkpoint, load_newest, save_checkpoint


def checkpoint(step: int, *, bad: bool = False) -> Checkpoint:
    weight = torch.arange(40.0) + step
    if bad:
        weight[3] = torch.nan
    rng = {"torch": torch.arange(16, dtype=torch.uint8) + step}
    return Checkpoint(step, {"model": {"w": weight}, "rng": rng, "progress": {"epoch": step}}, fingerprint="f")


def steps(folder: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(folder)]


def newest(folder: Path) -> int:
    loaded = load_newest(folder)
    assert loaded is not None
    assert torch.equal(loaded.checkpoint.parts["model"]["w"], torch.arange(40.0) + loaded.checkpoint.step)
    return loaded.checkpoint.step


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "跑 一" / "checkpoints"


def test_a_checkpoint_comes_back_as_it_was(folder):
    assert load_newest(folder) is None
    saved = save_checkpoint(folder, checkpoint(7))
    assert (saved.path, saved.problem, saved.is_good) == (folder / "step-7", "", True)
    loaded = load_newest(folder)
    assert loaded.rejected == ()
    assert loaded.checkpoint.fingerprint == "f"
    assert loaded.checkpoint.parts["progress"] == {"epoch": 7}
    assert loaded.checkpoint.parts["rng"]["torch"].dtype == torch.uint8
    # Other tools read the weights without us.
    assert torch.equal(load_file(folder / "step-7" / "model.safetensors")["w"], torch.arange(40.0) + 7)
    assert sorted(os.listdir(folder)) == ["step-7"]


def test_the_manifest_says_what_was_written_and_by_what(folder):
    saved = save_checkpoint(folder, checkpoint(1))
    values = json.loads((saved.path / "manifest.json").read_text())
    assert values["files"]["model.safetensors"]["num_bytes"] == (saved.path / "model.safetensors").stat().st_size
    assert values["versions"]["torch"] == torch.__version__
    assert values["all_finite"] is True
    assert set(values["files"]) == {p.name for p in saved.path.iterdir()} - {"manifest.json"}


@settings(deadline=None, max_examples=30)
@given(order=st.lists(st.integers(1, 9), min_size=1, max_size=8), keep=st.integers(1, 5), best=st.integers(0, 7))
def test_pruning_keeps_the_newest_and_the_best_and_what_was_just_saved(order, keep, best, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prune")
    on_disk: set[int] = set()
    marked = None
    for i, step in enumerate(order):
        save_checkpoint(folder, checkpoint(step), keep=keep)
        others = sorted(on_disk - {step})
        kept = set(others[len(others) - (keep - 1) :] if keep > 1 else []) if len(others) >= keep else set(others)
        on_disk = {step, *kept, *(s for s in others if s > step or s == marked)}
        assert set(steps(folder)) == on_disk
        if i == best:
            mark_best(folder, step)
            marked = step
        assert best_step(folder) == marked
    assert newest(folder) == max(on_disk)
    shutil.rmtree(folder)


@pytest.mark.parametrize("mark", [None, 2, 5])
def test_the_best_that_a_checkpoint_names_is_never_pruned_whatever_the_mark_says(mark, folder):
    """As after kills between a checkpoint and the mark."""
    for step in range(1, 8):
        best = Best(3, 0.5) if step >= 3 else Best(step, 1.0)
        save_checkpoint(folder, replace(checkpoint(step), best=best), keep=1)
        if step == mark:
            mark_best(folder, step)
        assert best_step(folder) == best.step
        assert steps(folder) == sorted({best.step, step})
    assert mend_best(folder, load_newest(folder).checkpoint.best)
    assert json.loads((folder / "best.json").read_text()) == {"step": 3, "about": {"loss": 0.5}}
    assert not mend_best(folder, load_newest(folder).checkpoint.best)


def test_the_best_waits_under_its_other_name_while_it_is_replaced(folder):
    save_checkpoint(folder, replace(checkpoint(3), best=Best(3, 0.5)))
    (folder / "step-3").rename(folder / ".replaced-3-0")
    assert best_step(folder) == 3


def test_nan_is_never_good_never_best_never_picked_and_prunes_nothing_good(folder):
    save_checkpoint(folder, checkpoint(1), keep=1)
    for step in (2, 3):
        saved = save_checkpoint(folder, checkpoint(step, bad=True), keep=1)
        assert not saved.is_good
        assert "model.w" in saved.problem
    assert steps(folder) == [1, 3]
    assert newest(folder) == 1
    assert "model.w" in load_newest(folder).rejected[0]
    assert load_newest(folder, only_finite=False).checkpoint.step == 3
    with pytest.raises(CheckpointError, match="step 3 cannot be the best"):
        mark_best(folder, 3)
    with pytest.raises(CheckpointError, match="may not replace"):
        save_checkpoint(folder, checkpoint(1, bad=True))
    save_checkpoint(folder, checkpoint(4), keep=1)
    assert steps(folder) == [4]


def test_when_nothing_can_be_used_the_run_does_not_silently_begin_again(folder):
    save_checkpoint(folder, checkpoint(1, bad=True))
    with pytest.raises(CheckpointError, match="no checkpoint of this run"):
        load_newest(folder)


def test_the_same_step_can_be_saved_again(folder):
    save_checkpoint(folder, checkpoint(3), keep=1)
    other = Checkpoint(3, {"model": {"w": torch.ones(2)}})
    save_checkpoint(folder, other, keep=1)
    assert sorted(os.listdir(folder)) == ["step-3"]
    assert load_newest(folder).checkpoint.parts["model"]["w"].shape == (2,)


def test_a_replacement_that_fails_leaves_the_old_one(folder):
    save_checkpoint(folder, checkpoint(3), keep=1)
    with armed("checkpoint.old_moved:eio:1"), pytest.raises(CheckpointError, match="device"):
        save_checkpoint(folder, checkpoint(3), keep=1)
    assert os.listdir(folder) == ["step-3"]
    assert newest(folder) == 3


def test_between_the_two_renames_of_a_replacement_readers_take_the_old_one(folder):
    save_checkpoint(folder, checkpoint(3), keep=1)
    (folder / "step-3").rename(folder / ".replaced-3-abc")
    assert newest(folder) == 3
    assert clean_leftovers(folder) == ()
    assert os.listdir(folder) == ["step-3"]


def test_a_roll_back_leaves_nothing_newer_behind(folder):
    for step in (1, 2, 3):
        save_checkpoint(folder, checkpoint(step))
    with pytest.raises(CheckpointError, match="no good one"):
        discard_after(folder, 9)
    discard_after(folder, 1)
    assert steps(folder) == [1]


def test_leftovers_of_killed_saves_are_cleaned_and_named(folder):
    save_checkpoint(folder, checkpoint(2))
    (folder / ".stage-4-abc").mkdir()
    (folder / ".stage-4-abc" / "model.safetensors").write_bytes(b"half")
    (folder / ".pruned-step-1-abc").mkdir()
    assert clean_leftovers(folder) == (".pruned-step-1-abc", ".stage-4-abc")
    assert os.listdir(folder) == ["step-2"]


@pytest.mark.parametrize(
    ("step", "keep", "name"), [(-1, 1, "model"), (1, 0, "model"), (1, 1, "../model"), (1, 1, "a b")]
)
def test_a_save_that_makes_no_sense_is_refused(folder, step, keep, name):
    with pytest.raises(CheckpointError):
        save_checkpoint(folder, Checkpoint(step, {name: {}}), keep=keep)
    assert not folder.exists()


# Disk full


def every_visit() -> list[str]:
    """Each place of a save, and of a save over an existing step, as `name:action:nth` for each error in turn."""
    with tempfile.TemporaryDirectory() as place, recorded() as visits:
        for step in (1, 2, 2):
            save_checkpoint(Path(place), checkpoint(step), keep=1)
    kinds = list(ERRORS)
    points = [(name, nth) for name, num in visits.items() for nth in range(1, num + 1)]
    return [f"{name}:{kinds[i % len(kinds)]}:{nth}" for i, (name, nth) in enumerate(points)]


def test_an_error_at_any_place_of_a_save_leaves_a_good_checkpoint_and_a_clear_message(tmp_path):
    specs = every_visit()
    assert len(specs) > 60
    for number, spec in enumerate(specs):
        folder = tmp_path / str(number)
        done, message, is_clear = 0, None, True
        with armed(spec):
            for step in (1, 2, 2):
                try:
                    saved = save_checkpoint(folder, checkpoint(step), keep=1)
                    done, message = step, message or saved.problem
                except CheckpointError as error:
                    message = str(error)
                    is_clear = "bytes needed" in error.seen and "run the same command again" in error.do
                if done:
                    assert newest(folder) >= done, spec
                assert not list(folder.glob(".stage-*")), spec
        assert message, spec
        assert is_clear, spec
        clean_leftovers(folder)
        save_checkpoint(folder, checkpoint(3), keep=1)
        assert (newest(folder), os.listdir(folder)) == (3, ["step-3"]), spec


def test_a_save_that_does_not_fit_is_refused_before_it_begins(folder, monkeypatch):
    save_checkpoint(folder, checkpoint(1), keep=1)
    monkeypatch.setattr(atomic_files, "free_bytes", lambda place: 1000)
    with pytest.raises(CheckpointError, match=r"the disk is full.*(?s:.*)1,048,\d+ bytes needed, 1,000 free"):
        save_checkpoint(folder, checkpoint(2), keep=1)
    assert os.listdir(folder) == ["step-1"]
    monkeypatch.undo()
    save_checkpoint(folder, checkpoint(2), keep=1)
    assert newest(folder) == 2


def test_a_real_limit_of_the_system_leaves_the_old_checkpoint(folder):
    save_checkpoint(folder, checkpoint(1), keep=1)
    child = os.fork()
    if child == 0:
        # Files may have 64 bytes from here on; the write itself fails.
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        try:
            save_checkpoint(folder, checkpoint(2), keep=1)
        except CheckpointError as error:
            os._exit(0 if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG else 4)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.listdir(folder) == ["step-1"]
    save_checkpoint(folder, checkpoint(2), keep=1)
    assert newest(folder) == 2


# Damage

FILES = ["manifest.json", "model.safetensors", "rng.safetensors", "values.json"]
MUTATIONS = ["flip", "truncate", "grow", "zero", "swap", "missing", "stale", "shape", "dtype", "extra", "link", "empty"]


def damage(folder: Path, kind: str, name: str, place: float) -> None:
    """Change step-3 in one way; step-2 and step-1 stay."""
    target, older = folder / "step-3", folder / "step-2"
    file = target / name
    data = bytearray(file.read_bytes())
    at = int(place * (len(data) - 1))
    if kind == "flip":
        data[at] ^= 1 << (at % 8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "grow":
        data += b"\0"
    elif kind == "zero":
        end = min(len(data), at + 512)
        data[at:end] = bytes(end - at) if any(data[at:end]) else b"\1" * (end - at)
    file.write_bytes(data)
    if kind == "swap":
        shutil.copy(older / name, file)
    elif kind == "missing":
        file.unlink()
    elif kind == "stale":
        shutil.copy(older / "manifest.json", target / "manifest.json")
    elif kind in ("shape", "dtype"):
        other = torch.zeros(20) if kind == "shape" else torch.zeros(40, dtype=torch.float64)
        (target / "model.safetensors").unlink()
        atomic_files.write_chunks(target / "model.safetensors", [save({"w": other})])
    elif kind == "extra":
        (target / "optimiser.safetensors").write_bytes(b"?")
    elif kind == "link":
        file.unlink()
        file.symlink_to(older / name)
    elif kind == "empty":
        shutil.rmtree(target)
        target.mkdir()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    for step in (1, 2, 3):
        save_checkpoint(folder, checkpoint(step))
    return folder


def check_damage(pristine: Path, folder: Path, kind: str, name: str, place: float) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(pristine, folder)
    damage(folder, kind, name, place)
    with pytest.raises(CheckpointError):
        load_checkpoint(folder / "step-3")
    loaded = load_newest(folder)
    assert loaded.checkpoint.step == 2
    assert len(loaded.rejected) == 1
    assert loaded.rejected[0].startswith("step-3: ")


damages = {"kind": st.sampled_from(MUTATIONS), "name": st.sampled_from(FILES), "place": st.floats(0, 1)}


@settings(deadline=None, max_examples=60)
@given(**damages)
def test_damage_is_always_seen_and_the_newest_good_one_taken(pristine, tmp_path_factory, kind, name, place):
    check_damage(pristine, tmp_path_factory.getbasetemp() / "damaged", kind, name, place)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_thousand_damages_are_seen(pristine, tmp_path, record_property):
    draw = random.Random(0)
    for _ in range(2000):
        check_damage(pristine, tmp_path / "x", draw.choice(MUTATIONS), draw.choice(FILES), draw.random())
    record_property("trials", 2000)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_kind_of_damage_is_seen(pristine, tmp_path, kind):
    check_damage(pristine, tmp_path / "x", kind, "model.safetensors", 0.9)


@pytest.mark.parametrize("name", ["step", "files", "fingerprint", "all_finite", "nonfinite", "versions", "written"])
def test_a_manifest_with_one_changed_value_is_refused(folder, name):
    save_checkpoint(folder, checkpoint(1))
    saved = save_checkpoint(folder, checkpoint(2, bad=True))
    values = json.loads((saved.path / "manifest.json").read_text())
    other = {"all_finite": True, "nonfinite": [], "step": 3, "versions": {}, "files": {}}
    values[name] = other.get(name, "changed")
    (saved.path / "manifest.json").write_text(json.dumps(values, indent=1))
    loaded = load_newest(folder, only_finite=False)
    assert loaded.checkpoint.step == 1
    assert "its own hash" in loaded.rejected[0]


def test_a_newer_format_is_refused_by_its_version(folder, monkeypatch):
    save_checkpoint(folder, checkpoint(1))
    saved = save_checkpoint(folder, checkpoint(2))
    monkeypatch.setattr("truebatch.training.checkpoint.manifest.VERSION", 4)
    (saved.path / "manifest.json").write_text(manifest_text(read_manifest_of(saved.path, monkeypatch)))
    monkeypatch.undo()
    assert "version 4" in load_newest(folder).rejected[0]


def read_manifest_of(path: Path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("truebatch.training.checkpoint.manifest.VERSION", 1)
        return read_manifest(path)


def test_loading_never_unpickles(folder, monkeypatch):
    import pickle

    save_checkpoint(folder, checkpoint(1))
    monkeypatch.setattr(pickle, "Unpickler", None)
    monkeypatch.setattr(torch, "load", None)
    assert newest(folder) == 1
