"""What a run was made with: written once, compared each time the run is resumed, which is refused, naming what differs."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truebatch.errors import RunError
from truebatch.io.atomic_files import corrupt_file_errors, read_json, write_json
from truebatch.scoring.store.content_key import canonical

MANIFEST, CALL = "manifest.json", "call.json"
"""What a run depends on, and how it was asked for."""
FORMAT, VERSION = "truebatch-journal", 1
_MOST_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ScoringManifest:
    """Everything a score depends on beside the sample itself."""

    run: str
    fields: Mapping[str, Any]
    """Flat or nested plain values: model, weights, adapter, dtype, processor, template, readout, level, versions."""

    @property
    def fingerprint(self) -> str:
        """A hash of the fields."""
        return hashlib.sha256(canonical(dict(self.fields)).encode()).hexdigest()


def settle_manifest(run: Path, fields: Mapping[str, Any]) -> ScoringManifest:
    """Write the manifest of a new run, or compare with the one that is there.

    A difference raises `RunError` that names every differing field with the old and the new value.
    """
    path = run / MANIFEST
    if path.exists():
        known = read_manifest(run)
        changed = list(_differences(dict(known.fields), dict(fields)))
        if changed:
            raise RunError(
                f"the run {run} was made with another configuration; scores of both must not be mixed",
                seen="; ".join(f"{name}: was {old!r}, now {new!r}" for name, old, new in changed[:8]),
                do="take the change back, name another run folder with --out, or start again with --fresh",
            )
        return known
    run.mkdir(parents=True, exist_ok=True)
    manifest = ScoringManifest(uuid.uuid4().hex, dict(fields))
    about = {"format": FORMAT, "version": VERSION, "run": manifest.run, "fingerprint": manifest.fingerprint}
    write_json(path, {**about, "config": dict(fields)})
    return manifest


def read_manifest(run: Path) -> ScoringManifest:
    """The manifest of a run; what is none, or of another format, raises `RunError`."""
    if not (run / MANIFEST).is_file():
        raise RunError(f"{run} is not a scoring run", seen=f"no {MANIFEST} in it", do="give the folder of a run")
    values = read_json(run / MANIFEST, max_bytes=_MOST_BYTES)
    if not isinstance(values, dict) or (values.get("format"), values.get("version")) != (FORMAT, VERSION):
        raise RunError(
            f"{run / MANIFEST} is not a manifest this version can read",
            seen=f"format {values.get('format') if isinstance(values, dict) else type(values).__name__!r}",
            do="use the version of truebatch that made the run",
        )
    with corrupt_file_errors(run / MANIFEST, do="restore it from a backup, or start again with --fresh"):
        manifest = ScoringManifest(str(values["run"]), values["config"])
        is_whole = manifest.fingerprint == values["fingerprint"]
    if not is_whole:
        raise RunError(
            f"{run / MANIFEST} was changed by hand",
            seen="its fingerprint does not belong to its configuration",
            do="restore it from a backup, or start again with --fresh",
        )
    return manifest


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
    elif canonical(old) != canonical(new):
        yield name, old, new
