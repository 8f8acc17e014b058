"""Large datasets are read once: their stays are kept as arrays, and mapped into memory the next time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from truebatch.io.atomic_files import write_text
from truebatch.planning.lengths.measured_values import cache_folder
from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import Stays, open_stays, save_stays
from truebatch_systems.seqset_vae.data.faults import Findings, Found
from truebatch_systems.seqset_vae.data.labels import SPLITS
from truebatch_systems.seqset_vae.data.read import Source, known_variables
from truebatch_systems.seqset_vae.data.variables import name_variables

LARGE_FILES, LARGE_BYTES = 1000, 64 * 2**20
"""From either on, stays are kept."""
READING = ("columns", "labels", "drop_faulty", "strict", "validation_share", "test_share", "split_seed")
"""Settings that decide what is read from the files, beside the files themselves."""
ABOUT = "about.json"

State = tuple[tuple[str, int, int], ...]
"""Name, size and time of every file."""


def read_once(config: SeqSetConfig, state: State, findings: Findings, read: Callable[[], Source]) -> Source:
    """What `read` gives, from files kept earlier if nothing has changed since; faults are told again.

    Small datasets are simply read.
    """
    if len(state) < LARGE_FILES and sum(size for _, size, _ in state) < LARGE_BYTES:
        return read()
    folder = cache_folder() / "seqset_vae" / _key(config, state)
    kept = _open(folder, config, findings)
    if kept is not None:
        return kept
    source = read()
    _keep(folder, source, findings)
    return source


def _key(config: SeqSetConfig, state: State) -> str:
    settings = {name: asdict(v) if name == "columns" else v for name in READING for v in [getattr(config, name)]}
    model = (config.model.num_classes, config.model.embedding_dim)
    text = json.dumps([settings, model, state], default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _keep(folder: Path, source: Source, findings: Findings) -> None:
    for split, stays in source.splits.items():
        save_stays(stays, folder / split)
    about = {
        "names": source.variables.names,
        "has_statistics": source.has_statistics,
        "found": {kind: asdict(found) for kind, found in findings.found.items()},
        "splits": list(source.splits),
    }
    # Written last: without it, the rest does not count.
    write_text(folder / ABOUT, json.dumps(about))


def _open(folder: Path, config: SeqSetConfig, findings: Findings) -> Source | None:
    if not (folder / ABOUT).is_file():
        return None
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    splits: dict[str, Stays] = {}
    for split in (s for s in SPLITS if s in about["splits"]):
        stays = open_stays(folder / split)
        if stays is None:
            return None
        splits[split] = stays
    variables = known_variables(config) or name_variables(about["names"], width=config.model.embedding_dim)
    if list(variables.names) != about["names"]:
        return None
    findings.found |= {kind: Found(**found) for kind, found in about["found"].items()}
    return Source(splits, variables, has_statistics=about["has_statistics"])
