"""Folders that hold a dataset in a known format: MEDS, OMOP or PhysioNet 2012, recognised by their files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from truebatch_systems.seqset_vae.config import NO_LABELS, SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import UNLABELLED
from truebatch_systems.seqset_vae.data.event_tables import Events
from truebatch_systems.seqset_vae.data.faults import Findings
from truebatch_systems.seqset_vae.data.formats import meds, omop, physionet2012
from truebatch_systems.seqset_vae.data.labels import (
    SPLITS,
    Labels,
    parse_label,
    read_labels,
    share_out,
    stay_key,
)

Named = tuple[str, Events]


@dataclass(frozen=True, slots=True, eq=False)
class FoundStays:
    """The stays of a folder, shared out to splits, with what labels them."""

    kind: str
    splits: Mapping[str, Sequence[Named]]
    labels: Labels
    place: str
    """Where the labels are from."""


def read_known_format(config: SeqSetConfig, folder: Path, findings: Findings) -> FoundStays | None:
    """The stays of a folder in a format that is recognised; None for any other folder."""
    readers: tuple[Callable[[SeqSetConfig, Path, Findings], FoundStays | None], ...] = (
        _read_meds,
        _read_omop,
        _read_physionet,
    )
    return next((found for reader in readers if (found := reader(config, folder, findings)) is not None), None)


def _read_meds(config: SeqSetConfig, folder: Path, findings: Findings) -> FoundStays | None:
    dataset = meds.find_dataset(folder)
    if dataset is None:
        return None
    task = _label_file(config, dataset.tasks[0] if len(dataset.tasks) == 1 else None)
    questions = meds.read_questions(task, config.columns) if task is not None else []
    asked = meds.questions_by_patient(questions)
    split_of = meds.splits_of(dataset)
    samples: list[tuple[str, Named]] = []
    labels: Labels = {}
    for subject, events in meds.read_patients(dataset, config.columns):
        rows = asked.get(subject, []) if task is not None else [(subject, meds.Question(subject, math.inf, None, ""))]
        for name, question in rows:
            samples.append((subject, (name, meds.known_until(events, question.until))))
            if question.label is not None:
                label = parse_label(question.label, question.place, findings, num_classes=config.model.num_classes)
                labels[stay_key(name)] = label
    place = str(task) if task is not None else f"{dataset.root} (no task is named: --set labels=TASK.parquet)"
    if split_of:
        splits = {split: [named for who, named in samples if split_of.get(who) == split] for split in SPLITS}
    else:
        splits = _shared(config, [who for who, _ in samples], [named for _, named in samples], labels)
    return FoundStays("MEDS", splits, labels, place)


def _read_omop(config: SeqSetConfig, folder: Path, findings: Findings) -> FoundStays | None:
    tables = omop.find_tables(folder)
    if not tables:
        return None
    named = list(omop.read_patients(tables, config.columns))
    path = _label_file(config, None)
    labels = _labels(config, path, findings)
    splits = _shared(config, [name for name, _ in named], named, labels)
    return FoundStays("OMOP", splits, labels, str(path or "no label file: --set labels=FILE"))


def _read_physionet(config: SeqSetConfig, folder: Path, findings: Findings) -> FoundStays | None:
    files = physionet2012.find_records(folder)
    if not files:
        return None
    path = _label_file(config, physionet2012.find_outcomes(files[0].parent))
    labels = _labels(config, path, findings)
    named = list(physionet2012.read_records(files, findings))
    splits = _shared(config, [name for name, _ in named], named, labels)
    return FoundStays("PhysioNet 2012", splits, labels, str(path or "no table of outcomes: --set labels=FILE"))


def _label_file(config: SeqSetConfig, usual: Path | None) -> Path | None:
    return None if config.labels == NO_LABELS else config.labels or usual


def _labels(config: SeqSetConfig, path: Path | None, findings: Findings) -> Labels:
    if path is None:
        return {}
    return read_labels(path, config.columns, findings, num_classes=config.model.num_classes)


def _shared(
    config: SeqSetConfig, patients: Sequence[str], named: Sequence[Named], labels: Labels
) -> dict[str, list[Named]]:
    """Stays shared out by patient: no patient is in two splits, and classes are shared out alike."""
    first: dict[str, int] = {}
    for at, patient in enumerate(patients):
        first.setdefault(patient, at)
    classes = [labels.get(stay_key(named[at][0]), UNLABELLED) for at in first.values()]
    names = list(first)
    shares = share_out(
        names, np.array(classes, dtype=np.int64), validation=config.validation_share, test=config.test_share,
        seed=config.split_seed,
    )  # fmt: skip
    split_of = {names[at]: split for split, places in shares.items() for at in places}
    return {
        split: [one for who, one in zip(patients, named, strict=True) if split_of[who] == split] for split in SPLITS
    }
