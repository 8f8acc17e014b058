"""Which checkpoints a folder holds, which is the best, which may go.

`step-N/` is a checkpoint; `.stage-*`, `.pruned-*` are what killed saves left; `.replaced-N-*` waits for a new `step-N`
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from truebatch.errors import CheckpointError, TruebatchError
from truebatch.io.atomic_files import read_json, storage_error, sync_folder, write_json
from truebatch.testing.failpoints import failpoint
from truebatch.training.checkpoint.manifest import Best, CheckpointManifest, check_names, read_manifest, untrusted

BEST, KEPT = "best.json", "kept.json"
_BEST_BYTES = 1 << 20
_STEP = re.compile(r"step-(\d+)|\.replaced-(\d+)-\w+")
_LEFTOVER = re.compile(r"\.(stage|pruned)-.*")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on the disk."""

    step: int
    path: Path
    manifest: CheckpointManifest | None
    problem: str = ""
    """Why it is not a good checkpoint, or what went wrong while old ones were pruned; empty when all is well."""

    @property
    def is_good(self) -> bool:
        """Whole as far as names and sizes tell, and free of NaN and infinity."""
        return self.manifest is not None and self.manifest.all_finite


def list_checkpoints(folder: Path) -> tuple[SavedCheckpoint, ...]:
    """Every checkpoint folder, oldest first, looked at by manifest, names and sizes but not read.

    One that is not usable has a `problem`. Nothing is changed, so any process may ask.
    """
    if not folder.is_dir():
        return ()
    found = [(name, step_of(name)) for name in os.listdir(folder)]
    # A replaced checkpoint counts until its replacement is there; of two for a step, the replacement is newer.
    order = sorted((step, name.startswith("step-"), name) for name, step in found if step is not None)
    return tuple(_look(folder / name, step) for step, _, name in order)


def mark_best(folder: Path, step: int, *, about: Mapping[str, Any] | None = None) -> None:
    """Note that the checkpoint of a step is the best so far: it is then never pruned. Calling it again is harmless."""
    found = [entry for entry in list_checkpoints(folder) if entry.step == step]
    if not any(entry.is_good for entry in found):
        raise CheckpointError(
            f"step {step} cannot be the best: it has no good checkpoint",
            seen="; ".join(entry.problem for entry in found) or f"no folder step-{step} in {folder}",
            do="save it first, and mark only steps without NaN and infinity",
        )
    try:
        failpoint("best.before_mark")
        write_json(folder / BEST, _mark_of(step, about))
        failpoint("best.marked")
    except OSError as error:
        raise storage_error(CheckpointError, error, what=BEST, folder=folder) from error


def _mark_of(step: int, about: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"step": step, "about": dict(about or {})}


def mark_kept(folder: Path, step: int) -> None:
    """Note that the checkpoint of a step must not be pruned, until another is noted so."""
    try:
        write_json(folder / KEPT, {"step": step})
    except OSError as error:
        raise storage_error(CheckpointError, error, what=KEPT, folder=folder) from error


def kept_step(folder: Path) -> int | None:
    """The step that was marked as to be kept, if its checkpoint is still there."""
    return _marked(folder, KEPT)


def best_step(folder: Path) -> int | None:
    """The step of the best checkpoint, if it is still there.

    What the newest good checkpoint says of the run counts: a kill may have come between it and the mark. The mark
    counts where no checkpoint says anything, as in runs of earlier versions.
    """
    newest = next((entry for entry in reversed(list_checkpoints(folder)) if entry.is_good), None)
    return _best_of(folder, newest)


def _best_of(folder: Path, saved: SavedCheckpoint | None) -> int | None:
    best = saved.manifest.best if saved is not None and saved.manifest is not None else None
    if best is not None and _is_there(folder, best.step):
        return best.step
    return _marked(folder, BEST)


def mend_best(folder: Path, best: Best | None) -> bool:
    """Write the mark of the best checkpoint that a kill has prevented; True if it was missing or another's.

    `best` is what the loaded checkpoint says. Only the owner of the run may call this.
    """
    if best is None or not any(entry.step == best.step and entry.is_good for entry in list_checkpoints(folder)):
        return False
    wanted = _mark_of(best.step, {"loss": best.loss})
    try:
        if (folder / BEST).exists() and read_json(folder / BEST, max_bytes=_BEST_BYTES) == wanted:
            return False
    except TruebatchError:
        pass  # A mark that cannot be read is written anew from what the checkpoint says.
    mark_best(folder, best.step, about={"loss": best.loss})
    return True


def _marked(folder: Path, name: str) -> int | None:
    if not (folder / name).exists():
        return None
    values = read_json(folder / name, max_bytes=_BEST_BYTES)
    step = values.get("step") if isinstance(values, dict) else None
    return step if isinstance(step, int) and _is_there(folder, step) else None


def _is_there(folder: Path, step: int) -> bool:
    """Also while it waits under another name for the folder that replaces it."""
    return any(step_of(name) == step and (folder / name).is_dir() for name in os.listdir(folder))


def discard_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps: a run that was rolled back must not resume from what it left behind.

    Refused unless the step itself has a good checkpoint.
    """
    entries = list_checkpoints(folder)
    if not any(entry.step == step and entry.is_good for entry in entries):
        raise CheckpointError(
            f"later checkpoints are kept: step {step} has no good one to go back to",
            seen=f"checkpoints of steps {[entry.step for entry in entries]} in {folder}",
            do="roll back to a step with a good checkpoint",
        )
    for entry in entries:
        if entry.step > step:
            _remove(entry.path)


def clean_leftovers(folder: Path) -> tuple[str, ...]:
    """Remove what killed saves left behind and give their names. Only the owner of the run may call this."""
    if not folder.is_dir():
        return ()
    names = sorted(os.listdir(folder))
    stale = [name for name in names if _LEFTOVER.fullmatch(name)]
    stale += [name for name in names if name.startswith(".replaced-") and not _restore(folder, name)]
    for name in stale:
        failpoint("clean.before_delete")
        shutil.rmtree(folder / name)
        failpoint("clean.deleted")
    return tuple(stale)


def _restore(folder: Path, name: str) -> bool:
    """Give a replaced checkpoint its name back if its replacement never came."""
    target = folder / f"step-{step_of(name)}"
    if target.exists():
        return False
    failpoint("clean.before_restore")
    (folder / name).rename(target)
    sync_folder(folder)
    failpoint("clean.restored")
    return True


def prune_after(folder: Path, saved: SavedCheckpoint, *, keep: int) -> SavedCheckpoint:
    """Delete all but the newest `keep` good checkpoints, the best and the one marked as kept, after one was saved.

    A failure here is reported in the result and not raised, because the save itself holds.
    """
    try:
        for entry in _to_prune(folder, saved, keep=keep):
            _remove(entry.path)
        failpoint("prune.done")
    except (OSError, TruebatchError) as error:
        problem = f"old checkpoints could not be deleted: {error}"
        return replace(saved, problem="; ".join(filter(None, (saved.problem, problem))))
    return saved


def _to_prune(folder: Path, saved: SavedCheckpoint, *, keep: int) -> list[SavedCheckpoint]:
    others = [entry for entry in list_checkpoints(folder) if entry.path != saved.path]
    if not saved.is_good:
        # Nothing that can be resumed goes because of something that cannot; one bad one is enough to look at.
        return [entry for entry in others if entry.manifest is not None and not entry.is_good]
    replaced = [entry for entry in others if entry.step == saved.step]
    older = [entry for entry in others if entry.step < saved.step]
    good = [entry for entry in others if entry.is_good and entry not in replaced]
    kept = good[max(0, len(good) - keep + 1) :]
    marked = (_best_of(folder, saved), kept_step(folder))
    return replaced + [entry for entry in older if entry not in kept and entry.step not in marked]


def _remove(path: Path) -> None:
    """Take a checkpoint off the list in one move, then delete it."""
    failpoint("prune.before_rename")
    gone = path.with_name(f".pruned-{path.name.removeprefix('.')}-{uuid.uuid4().hex[:12]}")
    path.rename(gone)
    failpoint("prune.renamed")
    shutil.rmtree(gone)
    failpoint("prune.deleted")


def _look(path: Path, step: int) -> SavedCheckpoint:
    try:
        manifest = check_shape(path)
    except TruebatchError as error:
        return SavedCheckpoint(step, path, None, error.seen)
    except OSError as error:
        return SavedCheckpoint(step, path, None, str(error))
    return SavedCheckpoint(step, path, manifest, finite_problem(manifest))


def check_shape(path: Path) -> CheckpointManifest:
    """The manifest of a checkpoint folder whose step, names and sizes agree with it; `CheckpointError` otherwise."""
    manifest = read_manifest(path)
    if manifest.step != step_of(path.name):
        raise untrusted(path, f"its manifest is that of step {manifest.step}")
    check_names(path, manifest)
    return manifest


def finite_problem(manifest: CheckpointManifest) -> str:
    """Words for a checkpoint that holds NaN or infinity; empty when it does not."""
    return "" if manifest.all_finite else f"NaN or infinity in {', '.join(manifest.nonfinite)}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint folder's name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1] or match[2]) if match else None
