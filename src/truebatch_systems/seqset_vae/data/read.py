"""Where stays come from: the generator, real persons by name, a folder of Parquet files, or one long table.

Each gives the stays of every split with their raw values, and the variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from truebatch.errors import DataError
from truebatch.io.text_encoding import nearest
from truebatch_systems.seqset_vae.config import GENERATED, NAFLD, NO_LABELS, ColumnConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import UNLABELLED, Stays, make_stays, take_stays
from truebatch_systems.seqset_vae.data.event_tables import Events, by_patient, read_long_table, read_stay_file
from truebatch_systems.seqset_vae.data.faults import Findings
from truebatch_systems.seqset_vae.data.formats.folder import FoundStays, read_known_format
from truebatch_systems.seqset_vae.data.formats.tables import TABLES, table_kind
from truebatch_systems.seqset_vae.data.labels import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    Labels,
    label_stays,
    parse_label,
    read_labels,
    share_out,
    stay_key,
)
from truebatch_systems.seqset_vae.data.nafld import load_nafld
from truebatch_systems.seqset_vae.data.repair import Numbers, Unknown, repair_stay
from truebatch_systems.seqset_vae.data.synthetic import generate_stays
from truebatch_systems.seqset_vae.data.variables import NOTHING_NAME, Variables, name_variables, read_embeddings

SPLIT_FOLDERS = {TRAIN: ("train",), VALIDATION: ("valid", "validation", "val"), TEST: ("test",)}
PATIENTS = "patient_ehr"


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Stays as they were found."""

    splits: Mapping[str, Stays]
    """train, and validation and test where there are any; values are raw."""
    variables: Variables
    has_statistics: bool = False
    """The variables' mean and deviation are known already, or the values need none."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a folder."""

    files: Mapping[str, list[Path]]
    """Split -> stay files; one split "train" where the folder has none."""
    root: Path
    is_split: bool


def read_source(config: SeqSetConfig, findings: Findings) -> Source:
    """The stays that `config.data` names, faults corrected and counted in `findings`."""
    if config.data in (GENERATED, NAFLD):
        return _built_in(config)
    path = Path(config.data)
    if path.is_dir():
        known = read_known_format(config, path, findings)
        return (
            _read_folder(config, find_files(path), findings) if known is None else _read_known(config, known, findings)
        )
    if table_kind(path) in TABLES:
        return _read_table(config, path, findings)
    names = [GENERATED, NAFLD]
    raise DataError(
        f"there is no data {config.data!r}{nearest(config.data, names)}",
        seen="it is no folder, no table and no name" if not path.exists() else f"a file that ends in {path.suffix!r}",
        do=f"give a folder ({PATIENTS}/, MEDS, OMOP or PhysioNet 2012), a table ({', '.join(TABLES)}), or one of "
        f"{', '.join(names)}",
    )


def find_files(folder: Path) -> Layout:
    """The stay files of a folder: patient_ehr/{train,valid,test}/, these three alone, or files without a split."""
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}",
            seen="a file" if folder.exists() else "nothing of that name",
            do=f"name the folder that holds {PATIENTS}/train/<patient>.parquet",
        )
    root = folder.parent if folder.name == PATIENTS else folder
    patients = next(p for p in (folder / PATIENTS, folder) if p.is_dir())
    found = {
        split: sorted((patients / name).glob("*.parquet"))
        for split, names in SPLIT_FOLDERS.items()
        for name in names
        if (patients / name).is_dir()
    }
    if found.get(TRAIN):
        return Layout(found, root, is_split=True)
    loose = sorted(patients.glob("*.parquet"))
    if loose:
        return Layout({TRAIN: loose}, root, is_split=False)
    raise DataError(
        f"{folder} holds no training stays",
        seen=f"{patients} holds {', '.join(sorted(p.name for p in patients.iterdir())[:6]) or 'nothing'}",
        do=f"name the folder that holds {PATIENTS}/train/<patient>.parquet",
    )


def find_table(config: SeqSetConfig, name: str, default: str) -> Path | None:
    """A table named in the settings (which must exist), or the usual one beside the stays (which may)."""
    given: Path | None = getattr(config, name)
    if given == NO_LABELS:
        return None
    folder = Path(config.data)
    if given is not None or not folder.is_dir():
        return given
    usual = (folder.parent if folder.name == PATIENTS else folder) / default
    return usual if usual.is_file() else None


def known_variables(config: SeqSetConfig) -> Variables | None:
    """The variables an embedding file names; None where the training stays do."""
    path = find_table(config, "embeddings", "cached.csv")
    return read_embeddings(path) if path is not None else None


def _built_in(config: SeqSetConfig) -> Source:
    width = config.model.embedding_dim
    is_generated = config.data == GENERATED
    stays, variables = generate_stays(config.generator, width=width) if is_generated else load_nafld(width=width)
    shares = _shares(config, stays.ids, stays.labels)
    splits = {split: take_stays(stays, places) for split, places in shares.items()}
    return Source(_filled(splits), variables, has_statistics=is_generated)


def _read_folder(config: SeqSetConfig, layout: Layout, findings: Findings) -> Source:
    path = find_table(config, "labels", "oc.csv")
    classes = config.model.num_classes
    labels = read_labels(path, config.columns, findings, num_classes=classes) if path is not None else {}
    files = layout.files if layout.is_split else _share_files(config, layout.files[TRAIN], labels)
    reader = _SplitReader(config, findings, known_variables(config))
    splits = {}
    for split in (s for s in SPLITS if files.get(s)):
        named = _open_files(files[split], config.columns, findings)
        splits[split] = reader.read(named, labels, str(path or "no label file"))
    return reader.source(splits)


def _read_known(config: SeqSetConfig, found: FoundStays, findings: Findings) -> Source:
    reader = _SplitReader(config, findings, known_variables(config))
    splits = {s: reader.read(found.splits[s], found.labels, found.place) for s in SPLITS if found.splits.get(s)}
    return reader.source(splits)


def _open_files(files: Iterable[Path], columns: ColumnConfig, findings: Findings) -> Iterator[tuple[str, Events]]:
    """The events of every file. One that cannot be read is an error, or a line of the report on all faults."""
    for file in files:
        try:
            events = read_stay_file(file, columns)
        except DataError as error:
            if not findings.policy.collect:
                raise
            findings.note("unreadable", str(file), seen=f"{error.wrong.removeprefix(str(file)).strip()}; {error.seen}")
            continue
        yield file.stem, events


def _share_files(config: SeqSetConfig, files: list[Path], labels: Labels) -> dict[str, list[Path]]:
    classes = np.array([labels.get(stay_key(file.stem), UNLABELLED) for file in files], dtype=np.int64)
    shares = _shares(config, [file.stem for file in files], classes)
    return {split: [files[i] for i in places] for split, places in shares.items()}


def _read_table(config: SeqSetConfig, path: Path, findings: Findings) -> Source:
    table = read_long_table(path, config.columns)
    patients = list(by_patient(table))
    place, labels = str(path), {}
    if config.labels == NO_LABELS:
        place = "no labels"
    elif config.labels is not None:
        place = str(config.labels)
        labels = read_labels(config.labels, config.columns, findings, num_classes=config.model.num_classes)
    elif table.label is not None:
        labels = {stay_key(name): _one_label(config, name, events, findings) for name, events in patients}
    classes = np.array([labels.get(stay_key(name), UNLABELLED) for name, _ in patients], dtype=np.int64)
    reader = _SplitReader(config, findings, known_variables(config))
    shares = _shares(config, [name for name, _ in patients], classes)
    splits = {split: reader.read([patients[i] for i in shares[split]], labels, place) for split in SPLITS}
    return reader.source(_filled(splits))


def _one_label(config: SeqSetConfig, name: str, events: Events, findings: Findings) -> int:
    """The label a long table repeats in every row of a patient."""
    assert events.label is not None
    classes = config.model.num_classes
    labels = [parse_label(v, events.place(i), findings, num_classes=classes) for i, v in enumerate(events.label)]
    other = next((i for i, label in enumerate(labels) if label != labels[0]), None)
    if other is not None:
        seen = f"patient {name!r}: {labels[other]}, before that {labels[0]}"
        findings.note("bad_label", events.place(other), seen=seen)
    return labels[0]


class _SplitReader:
    """Stays of one split after the other; where no file names the variables, the first split does."""

    def __init__(self, config: SeqSetConfig, findings: Findings, known: Variables | None) -> None:
        self.config, self.findings, self.known = config, findings, known
        self.numbers: Numbers = known.numbers() if known is not None else {NOTHING_NAME: 0}
        self.unknown: Unknown = "learn" if known is None else "unknown_variable"
        self.is_carried = False

    def read(self, named: Iterable[tuple[str, Events]], labels: Labels, place: str) -> Stays:
        """The stays of one split."""
        samples = []
        for name, events in named:
            self.is_carried |= events.is_carried
            samples.append({**repair_stay(name, events, self.numbers, self.findings, unknown=self.unknown), "label": 0})
        if self.unknown == "learn":
            self.unknown = "untrained_variable"
        stays = make_stays(samples)
        return replace(stays, labels=label_stays(stays.ids, labels, place, self.findings))

    def source(self, splits: Mapping[str, Stays]) -> Source:
        """All splits; variables without a file are numbered in the order of their names."""
        if self.known is not None:
            return Source(splits, self.known, has_statistics=self.is_carried)
        variables = name_variables(self.numbers, width=self.config.model.embedding_dim)
        place = variables.numbers()
        moved = np.array([place[name] for name in self.numbers], dtype=np.int32)
        renamed = {split: replace(stays, var=moved[stays.var]) for split, stays in splits.items()}
        return Source(renamed, variables, has_statistics=self.is_carried)


def _shares(config: SeqSetConfig, names: Any, labels: Any) -> dict[str, list[int]]:
    return share_out(names, labels, validation=config.validation_share, test=config.test_share, seed=config.split_seed)


def _filled(splits: Mapping[str, Stays]) -> dict[str, Stays]:
    return {split: stays for split, stays in splits.items() if len(stays)}
