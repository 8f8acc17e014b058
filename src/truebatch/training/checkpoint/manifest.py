"""The manifest of a checkpoint: written last, it says what every other file must be.

A folder without a manifest, or not as its manifest says, is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from truebatch.errors import CheckpointError, TruebatchError
from truebatch.io.atomic_files import FileFacts, hash_file, read_json, to_json

MANIFEST = "manifest.json"
FORMAT = "truebatch checkpoint"
VERSION = 2
SHARDED_VERSION = 3
_READ = (1, 2, 3)
"""1 says nothing of the best checkpoint, 3 has tensors in shards, which earlier versions of truebatch do not read."""
SHARDS = "shards.json"
"""Which rows of which tensors lie in which file, in a checkpoint that several ranks have written."""
_MOST_BYTES = 1 << 26
_MOST_NAMES = 20
_PACKAGES = ("truebatch", "torch", "safetensors", "numpy", "transformers", "accelerate")


@dataclass(frozen=True, slots=True)
class Best:
    """The best validation of a run, as it was known when a checkpoint was saved."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What a checkpoint says about itself."""

    step: int
    files: Mapping[str, FileFacts]
    fingerprint: str
    """Of the configuration of the run; compared by the caller."""
    all_finite: bool
    """No tensor holds NaN or infinity. Only such a checkpoint is good."""
    nonfinite: tuple[str, ...]
    """The first names of tensors that hold NaN or infinity."""
    versions: Mapping[str, str]
    written: str
    best: Best | None = None
    """Which checkpoint of the run is the best, this one or an earlier one; None before the first validation."""


def new_manifest(
    step: int, files: Mapping[str, FileFacts], *, fingerprint: str, nonfinite: list[str], best: Best | None = None
) -> CheckpointManifest:
    """The manifest of files that are on the disk already."""
    return CheckpointManifest(
        step=step,
        files=dict(files),
        fingerprint=fingerprint,
        all_finite=not nonfinite,
        nonfinite=tuple(nonfinite[:_MOST_NAMES]),
        versions=_versions(),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        best=best,
    )


def manifest_text(manifest: CheckpointManifest) -> str:
    """The manifest as JSON that holds a hash of itself, so that a changed manifest is seen too."""
    version = SHARDED_VERSION if SHARDS in manifest.files else VERSION
    values = {"format": FORMAT, "version": version, **asdict(manifest)}
    # No line end: a file that lost its last byte must not read the same.
    return to_json(values | {"check": _check_of(values)}, indent=1)


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint folder; what is missing, changed or of a newer version raises `CheckpointError`."""
    try:
        values = read_json(folder / MANIFEST, max_bytes=_MOST_BYTES)
    except TruebatchError as error:
        raise untrusted(folder, f"{MANIFEST}: {error.wrong}") from error
    except OSError as error:
        raise untrusted(folder, f"{MANIFEST}: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise untrusted(folder, f"{MANIFEST} is not one of truebatch")
    check, version = values.pop("check", None), values.get("version")
    if check != _check_of(values):
        raise untrusted(folder, f"{MANIFEST} does not agree with its own hash")
    if version not in _READ:
        raise untrusted(folder, f"{MANIFEST} has version {version}, this truebatch reads {_READ[-1]}")
    try:
        return _parse(values)
    except (TypeError, KeyError, AttributeError) as error:
        raise untrusted(folder, f"{MANIFEST} has other fields ({error})") from error


def _parse(values: dict[str, Any]) -> CheckpointManifest:
    files = {name: FileFacts(**facts) for name, facts in values["files"].items()}
    apart = ("format", "version", "files", "nonfinite", "best")
    rest = {key: value for key, value in values.items() if key not in apart}
    best = Best(**values["best"]) if values.get("best") is not None else None
    return CheckpointManifest(files=files, nonfinite=tuple(values["nonfinite"]), best=best, **rest)


def check_names(folder: Path, manifest: CheckpointManifest) -> None:
    """Raise `CheckpointError` unless the folder holds the files of the manifest, with their sizes, and no others."""
    found = {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}
    expected = {MANIFEST, *manifest.files}
    if missing := sorted(expected - set(found)):
        raise untrusted(folder, f"{missing[0]} is missing")
    if extra := sorted(set(found) - expected):
        raise untrusted(folder, f"{extra[0]} does not belong to it")
    for name, facts in manifest.files.items():
        if not found[name].is_file() or found[name].is_symlink():
            raise untrusted(folder, f"{name} is not a regular file")
        if (num := found[name].stat().st_size) != facts.num_bytes:
            raise untrusted(folder, f"{name} has {num:,} bytes, {facts.num_bytes:,} were written")


def check_hashes(folder: Path, manifest: CheckpointManifest) -> None:
    """Raise `CheckpointError` unless every file of the manifest is byte for byte what was written."""
    for name, facts in manifest.files.items():
        if hash_file(folder / name) != facts:
            raise untrusted(folder, f"{name} is not what was written: its SHA-256 differs")


def untrusted(folder: Path, seen: str) -> CheckpointError:
    """The error for a checkpoint that is not what it should be."""
    return CheckpointError(
        f"the checkpoint {folder.name} cannot be trusted",
        seen=f"{seen}, in {folder}",
        do="go back to an earlier checkpoint, or bring this one back from a copy",
    )


def _check_of(values: Mapping[str, Any]) -> str:
    # Sorted and compact: the hash is over the values, not over how the file lays them out.
    return hashlib.sha256(to_json(dict(sorted(values.items()))).encode()).hexdigest()


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
