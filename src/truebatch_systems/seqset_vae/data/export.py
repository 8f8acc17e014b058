"""Carry values forward once and write the stays again, as the carry-forward tool's files: one Parquet file a stay.

Columns: variable, value (normalised), time, set_index, age, is_carry and, with an embedding file, v0, v1, ...
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import ConfigError
from truebatch.io.atomic_files import atomic_text
from truebatch.io.data_files import read_samples
from truebatch_systems.seqset_vae.config import ColumnConfig
from truebatch_systems.seqset_vae.data.admissions import NOTHING, make_stays
from truebatch_systems.seqset_vae.data.event_tables import read_stay_file
from truebatch_systems.seqset_vae.data.faults import Findings, Policy
from truebatch_systems.seqset_vae.data.read import find_files
from truebatch_systems.seqset_vae.data.repair import Numbers, repair_stay
from truebatch_systems.seqset_vae.data.transform import Carried, carry_stay
from truebatch_systems.seqset_vae.data.variables import NOTHING_NAME, name_variables, read_embeddings, read_statistics

SMOKE_FILES = 3
SCHEMA = "schema.csv"
MOST_CATEGORIES = 20
BESIDE = ("oc.csv", "cached.csv")
"""Tables that are copied along, so that the new folder can be trained on as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CarryConfig:
    """What is read, what is written, and how long a value holds."""

    input_dir: Path
    output_dir: Path
    event_emb_csv: Path | None = None
    """By default cached.csv beside the stays, if there is one; without, no vectors are written."""
    value_stats_csv: Path | None = None
    """By default stats.csv beside the stays."""
    lvcf_minutes: float = 60.0
    always_carry_vars: tuple[str, ...] = ()
    overwrite: bool = False
    smoke: bool = False
    """Only the first files of every split, for a try."""
    drop_faulty: bool = False
    columns: ColumnConfig = field(default_factory=ColumnConfig)


@dataclass(frozen=True, slots=True)
class Written:
    """What came of it."""

    files: int
    events: int
    carried: int
    lines: tuple[str, ...]
    """Faults that were corrected or left out, with their places."""


def prepare_folder(config: CarryConfig) -> Written:
    """Write every stay again with its values normalised and carried forward. Files that are there stay, unless asked."""
    files = list(_files(config))
    _check_output(config, [target for _, target in files])
    writer = _StayWriter(config)
    for source, target in files:
        writer.write(source, target)
    writer.write_schema(config.output_dir / SCHEMA)
    for name in BESIDE:
        if (find_files(config.input_dir).root / name).is_file():
            shutil.copyfile(find_files(config.input_dir).root / name, config.output_dir / name)
    return Written(len(files), writer.events, writer.carried, tuple(writer.findings.lines()))


def _files(config: CarryConfig) -> Iterator[tuple[Path, Path]]:
    layout = find_files(config.input_dir)
    for files in layout.files.values():
        for file in files[: SMOKE_FILES if config.smoke else None]:
            yield file, config.output_dir / file.relative_to(layout.root)


def _check_output(config: CarryConfig, targets: list[Path]) -> None:
    there = [target for target in targets if target.exists()]
    if there and not config.overwrite:
        raise ConfigError(
            "files are in the way, nothing was written",
            seen=f"{there[0]} and {len(there) - 1} more" if len(there) > 1 else str(there[0]),
            do="name another --output-dir, or write over them with --overwrite",
        )


class _StayWriter:
    """Writes one stay after the other, and remembers what the schema needs."""

    def __init__(self, config: CarryConfig) -> None:
        self.config = config
        self.findings = Findings(Policy(drop_faulty=config.drop_faulty))
        root = find_files(config.input_dir).root
        path = config.event_emb_csv or root / "cached.csv"
        is_there = config.event_emb_csv is not None or path.is_file()
        self.known = read_embeddings(path) if is_there else None
        self.numbers: Numbers = {NOTHING_NAME: NOTHING}
        self.seen: dict[int, set[float]] = {}
        self.events = self.carried = 0
        self.statistics = _read_units(config.value_stats_csv or root / "stats.csv", self.findings)

    def write(self, source: Path, target: Path) -> None:
        """One stay, from its raw file to the carried one."""
        events = read_stay_file(source, self.config.columns)
        stay = {**repair_stay(source.stem, events, self.numbers, self.findings, unknown="learn"), "label": 0}
        sample = make_stays([stay])[0]
        always = [self.numbers[name] for name in self.config.always_carry_vars if name in self.numbers]
        carried = carry_stay(sample, minutes=self.config.lvcf_minutes, always=always)
        if carried.var[0] == NOTHING:
            carried = Carried(*(getattr(carried, f)[:0] for f in ("set_id", "var", "val", "age", "is_carry", "number")))
        for number, value in zip(sample["var"].tolist(), sample["val"].tolist(), strict=True):
            known = self.seen.setdefault(number, set())
            if len(known) <= MOST_CATEGORIES:
                known.add(value)
        self.events += len(carried.var)
        self.carried += int(carried.is_carry.sum())
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_parquet(target, self._columns(sample, carried))

    def _columns(self, sample: dict[str, Any], carried: Carried) -> dict[str, Any]:
        names = np.array(list(self.numbers), dtype=object)[carried.var]
        units = np.array([self.statistics.get(name, (0.0, 1.0)) for name in names]).reshape(-1, 2)
        columns: dict[str, Any] = {
            "variable": names.astype(str),
            "value": ((carried.val - units[:, 0]) / units[:, 1]).astype(np.float32),
            "time": sample["set_minute"][carried.set_id],
            "set_index": carried.set_id,
            "age": carried.age,
            "is_carry": carried.is_carry.astype(np.int8),
        }
        return columns | {f"v{d}": column for d, column in enumerate(self._vectors(names))}

    def _vectors(self, names: NDArray[Any]) -> NDArray[np.float32]:
        """[D, n] the vector of every event's variable; zeros for one the file does not name."""
        if self.known is None:
            return np.zeros((0, len(names)), dtype=np.float32)
        numbers = self.known.numbers()
        found: NDArray[np.float32] = self.known.vectors[[numbers.get(name, NOTHING) for name in names]].T
        return found

    def write_schema(self, path: Path) -> None:
        """What kind of number every variable is, guessed from its values."""
        with atomic_text(path) as file:
            writer = csv.writer(file)
            writer.writerow(["feature_id", "type", "cardinality", "name"])
            for at, (name, number) in enumerate(sorted((n, i) for n, i in self.numbers.items() if i != NOTHING)):
                writer.writerow([at, *guess_type(self.seen.get(number, set())), name])


def _read_units(path: Path, findings: Findings) -> dict[str, tuple[float, float]]:
    """Mean and deviation of every variable of a file; values are written normalised, so there must be one."""
    names = [str(row.get("variable", "")) for _, row in read_samples(path)]
    found = read_statistics(name_variables(names, width=1), path, findings)
    return {name: (found.mean[i], found.std[i]) for name, i in found.numbers().items()}


def guess_type(values: set[float]) -> tuple[str, int]:
    """`bin` for 0 and 1, `cat` for a few whole numbers without gaps and how many, else `cont`."""
    if values and values <= {0.0, 1.0}:
        return "bin", 2
    is_whole = all(value.is_integer() for value in values)
    if values and is_whole and len(values) <= MOST_CATEGORIES and max(values) - min(values) == len(values) - 1:
        return "cat", len(values)
    return "cont", 0


def _write_parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({name: pyarrow.array(column) for name, column in columns.items()}), path)
