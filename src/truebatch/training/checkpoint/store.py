"""Checkpoints that are there whole or not at all.

.stage-N-x/ -> files, fsync -> manifest last, fsync -> rename to step-N/ -> fsync the parent -> only then prune

One process of a run calls `save_checkpoint`; the others wait. Reading needs no ownership and changes nothing.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truebatch.errors import CheckpointError, TruebatchError
from truebatch.io.atomic_files import (
    FileFacts,
    read_json,
    require_space,
    storage_error,
    sync_folder,
    to_json,
    write_chunks,
)
from truebatch.testing.failpoints import failpoint
from truebatch.training.checkpoint.manifest import (
    MANIFEST,
    Best,
    CheckpointManifest,
    check_hashes,
    manifest_text,
    new_manifest,
    untrusted,
)
from truebatch.training.checkpoint.pytree import Packed, pack, unpack
from truebatch.training.checkpoint.retention import (
    SavedCheckpoint,
    check_shape,
    finite_problem,
    list_checkpoints,
    prune_after,
)
from truebatch.training.checkpoint.shard_files import read_row_tables, stored_tensors
from truebatch.training.checkpoint.tensor_files import nonfinite_names, num_bytes, read_tensors, write_tensors

VALUES = "values.json"
_TENSORS = ".safetensors"
_PART = re.compile(r"[a-z][a-z0-9_]*")
# Folders, headers and the journal of the filesystem take some room beside the tensors.
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All a run needs to go on after a step."""

    step: int
    parts: Mapping[str, Any]
    """Nested values by name (`model`, `optimiser`, `rng`, ...); the tensors of each go into a file of that name."""
    fingerprint: str = ""
    """Of the configuration that made it."""
    best: Best | None = None
    """The best validation so far; its checkpoint, this one or an earlier one, is never pruned."""


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint in memory, and the newer ones that could not be used, each with the reason."""

    checkpoint: Checkpoint
    path: Path
    rejected: tuple[str, ...] = ()


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 3) -> SavedCheckpoint:
    """Write a checkpoint as `folder/step-N`, then delete all but the newest `keep` good ones and the best.

    A kill at any moment leaves every earlier checkpoint readable, or the new one whole. When the disk is full the
    stage is removed, everything else stays, and `CheckpointError` says how many bytes are missing.
    """
    packed = pack_parts(checkpoint, keep=keep)
    nonfinite = nonfinite_in(packed)
    needed = bytes_of(packed)
    with storage_errors(checkpoint, folder, needed):
        begin_save(folder, checkpoint, nonfinite, needed)
        saved = _write(folder, checkpoint, packed, nonfinite)
    return prune_after(folder, saved, keep=keep)


@contextmanager
def storage_errors(checkpoint: Checkpoint, folder: Path, needed: int) -> Iterator[None]:
    """What the system refuses while a checkpoint is written, in words."""
    try:
        yield
    except OSError as error:
        what = f"the checkpoint of step {checkpoint.step}"
        raise storage_error(CheckpointError, error, what=what, folder=folder, num_bytes=needed) from error


def begin_save(folder: Path, checkpoint: Checkpoint, nonfinite: list[str], needed: int) -> None:
    """Refuse a checkpoint that may not be written, or for which there is no room."""
    _refuse_bad_over_good(folder, checkpoint.step, nonfinite)
    failpoint("checkpoint.before_space_check")
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, needed, what=f"the checkpoint of step {checkpoint.step}")


def nonfinite_in(packed: Mapping[str, Packed]) -> list[str]:
    """Names of the tensors of a checkpoint that hold NaN or infinity, as far as this rank has them."""
    whole = {f"{n}.{key}": t for n, part in packed.items() for key, t in part.tensors.items()}
    rows = {f"{n}.{key}": t.rows for n, part in packed.items() for key, t in part.shards.items()}
    return nonfinite_names(whole | rows)


def bytes_of(packed: Mapping[str, Packed]) -> int:
    """What the files take that are written from these tensors."""
    return sum(num_bytes(part.tensors) for part in packed.values()) + _SLACK_BYTES


def load_newest(folder: Path, *, only_finite: bool = True, whole: bool = True) -> LoadedCheckpoint | None:
    """The newest checkpoint that is byte for byte what was written; None when none was ever saved. `whole` as in
    `load_checkpoint`.

    Newer ones that are corrupt are skipped and reported. When checkpoints are there and none can be used,
    `CheckpointError` says why for each: a run never silently begins again.
    """
    rejected: list[str] = []
    for entry in reversed(list_checkpoints(folder)):
        try:
            if only_finite and entry.manifest is not None and not entry.manifest.all_finite:
                raise untrusted(entry.path, entry.problem)
            return LoadedCheckpoint(load_checkpoint(entry.path, whole=whole), entry.path, tuple(rejected))
        except TruebatchError as error:
            rejected.append(f"{entry.path.name}: {error.seen}")
    if not rejected:
        return None
    raise CheckpointError(
        "no checkpoint of this run can be used",
        seen="; ".join(rejected),
        do="bring one back from a copy, or start the run afresh",
    )


def load_checkpoint(path: Path, *, whole: bool = True) -> Checkpoint:
    """One checkpoint, after comparing every byte of it with its manifest.

    Tensors in shards are put together, or if not `whole` left where they are, as `StoredRows`.
    """
    try:
        failpoint("load.before_check")
        manifest = check_shape(path)
        check_hashes(path, manifest)
        failpoint("load.checked")
        parts = _read_parts(path, manifest, whole=whole)
        failpoint("load.read")
    except OSError as error:
        raise untrusted(path, str(error)) from error
    return Checkpoint(step=manifest.step, parts=parts, fingerprint=manifest.fingerprint, best=manifest.best)


def _read_parts(path: Path, manifest: CheckpointManifest, *, whole: bool) -> dict[str, Any]:
    stored = read_json(path / VALUES)
    if not isinstance(stored, dict):
        raise untrusted(path, f"{VALUES} holds no parts")
    parts, tables = {}, read_row_tables(path, manifest)
    for name, values in stored.items():
        file = f"{name}{_TENSORS}"
        tensors: dict[str, Any] = dict(read_tensors(path / file)) if file in manifest.files else {}
        for key, rows in stored_tensors(path, name, tables.get(name, {}), manifest).items():
            tensors[key] = rows.read(0, rows.shape[0]) if whole else rows
        parts[name] = unpack(values, tensors)
    return parts


def _refuse_bad_over_good(folder: Path, step: int, nonfinite: list[str]) -> None:
    if nonfinite and any(entry.is_good for entry in list_checkpoints(folder) if entry.step == step):
        raise CheckpointError(
            f"step {step} has a good checkpoint, which one with NaN or infinity may not replace",
            seen=f"NaN or infinity in {', '.join(nonfinite[:3])}",
            do="skip the bad step or roll back",
        )


def pack_parts(checkpoint: Checkpoint, *, keep: int) -> dict[str, Packed]:
    """The parts of a checkpoint taken apart; `CheckpointError` for what cannot be stored."""
    if keep < 1 or checkpoint.step < 0:
        raise CheckpointError(
            "a checkpoint needs a step and a place", seen=f"step={checkpoint.step}, keep={keep}", do="keep at least one"
        )
    for name in checkpoint.parts:
        if not _PART.fullmatch(name):
            raise CheckpointError(
                "a part of a checkpoint needs a plain name", seen=repr(name), do="use a-z, 0-9 and _, a letter first"
            )
    return {name: pack(value, name=name) for name, value in checkpoint.parts.items()}


def _write(folder: Path, checkpoint: Checkpoint, packed: Mapping[str, Packed], nonfinite: list[str]) -> SavedCheckpoint:
    stage = new_stage(folder, checkpoint.step)
    try:
        make_stage(stage)
        return commit_files(stage, checkpoint, write_files(stage, packed), nonfinite)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)  # what cannot be removed now goes at the next start
        raise


def new_stage(folder: Path, step: int) -> Path:
    """A folder, not made yet, for a checkpoint that is being written."""
    failpoint("checkpoint.before_stage")
    return folder / f".stage-{step}-{uuid.uuid4().hex[:12]}"


def make_stage(stage: Path) -> None:
    """Make the folder of a checkpoint that is being written."""
    stage.mkdir()
    failpoint("checkpoint.staged")


def commit_files(
    stage: Path, checkpoint: Checkpoint, files: Mapping[str, FileFacts], nonfinite: list[str]
) -> SavedCheckpoint:
    """Write the manifest of files that are on the disk, and give the checkpoint its name."""
    target = stage.with_name(f"step-{checkpoint.step}")
    manifest = new_manifest(
        checkpoint.step, files, fingerprint=checkpoint.fingerprint, nonfinite=nonfinite, best=checkpoint.best
    )
    _write_manifest(stage, manifest)
    _commit(stage, target, step=checkpoint.step)
    return SavedCheckpoint(checkpoint.step, target, manifest, finite_problem(manifest))


def write_files(stage: Path, packed: Mapping[str, Packed]) -> dict[str, FileFacts]:
    """Write the values of a checkpoint and its whole tensors."""
    files: dict[str, FileFacts] = {}
    for name, part in packed.items():
        if part.tensors:
            files[f"{name}{_TENSORS}"] = write_tensors(stage / f"{name}{_TENSORS}", part.tensors)
    text = to_json({name: part.values for name, part in packed.items()})
    return files | {VALUES: write_chunks(stage / VALUES, [text.encode()])}


def _write_manifest(stage: Path, manifest: CheckpointManifest) -> None:
    failpoint("checkpoint.before_manifest")
    write_chunks(stage / MANIFEST, [manifest_text(manifest).encode()])
    failpoint("checkpoint.after_manifest")
    sync_folder(stage)
    failpoint("checkpoint.stage_synced")


def _commit(stage: Path, target: Path, *, step: int) -> None:
    replaced = target.with_name(f".replaced-{step}-{uuid.uuid4().hex[:12]}")
    try:
        if target.exists():
            # Two renames are not one: until the second, readers take the checkpoint under its other name.
            target.rename(replaced)
            failpoint("checkpoint.old_moved")
        stage.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        raise
    failpoint("checkpoint.renamed")
    sync_folder(target.parent)
    failpoint("checkpoint.committed")
