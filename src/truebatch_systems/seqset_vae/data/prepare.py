"""Stays ready for the model: read, normalised, carried forward, cut; once for each dataset.

source -> mean and deviation -> carry forward -> cut by whole sets -> normalise -> train, validation, test
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from truebatch.errors import DataError
from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import Stays
from truebatch_systems.seqset_vae.data.cache import State, read_once
from truebatch_systems.seqset_vae.data.faults import Findings, Policy
from truebatch_systems.seqset_vae.data.labels import TEST, TRAIN, VALIDATION
from truebatch_systems.seqset_vae.data.read import Source, find_table, read_source
from truebatch_systems.seqset_vae.data.transform import SUMMARY, append_summary, carry_forward, cut_stays, numbers_of
from truebatch_systems.seqset_vae.data.variables import (
    Variables,
    normalise,
    read_statistics,
    statistics_of,
    with_counts,
    with_statistics_of_summary,
    with_summary,
)

DATA_FIELDS = (
    "data", "labels", "embeddings", "statistics", "columns", "max_events", "max_sets", "first_hours", "last_hours",
    "carry_minutes", "always_carry", "carry_counts", "drop_faulty", "strict", "validation_share", "test_share", "split_seed",
    "generator", "clip", "summarise",
)  # fmt: skip
"""Settings that decide what the stays are."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStays:
    """The stays of a run."""

    splits: Mapping[str, Stays]
    variables: Variables
    lines: tuple[str, ...]
    """What was read, corrected, left out and cut, for the start of a run."""

    @property
    def most_events(self) -> int:
        """Events of the longest stay of all splits."""
        return max(int(stays.num_events.max()) for stays in self.splits.values() if len(stays))

    @property
    def train(self) -> Stays:
        """Stays to learn from."""
        return self.splits[TRAIN]

    @property
    def validation(self) -> Stays | None:
        """Stays that decide when to stop."""
        return self.splits.get(VALIDATION)

    @property
    def test(self) -> Stays | None:
        """Stays that decide nothing."""
        return self.splits.get(TEST)


def prepare(config: SeqSetConfig) -> PreparedStays:
    """The stays that the settings name; read again only where settings or files have changed."""
    return _prepare(_StaysKey(config))


class _StaysKey:
    """Settings that are equal where the stays are."""

    def __init__(self, config: SeqSetConfig) -> None:
        self.config = config
        model = (config.model.embedding_dim, config.model.num_classes)
        self.files = _state(config)
        self.parts = (*(getattr(config, name) for name in DATA_FIELDS), model, self.files)

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StaysKey) and self.parts == other.parts


def _state(config: SeqSetConfig) -> State:
    """Name, size and time of every file the stays come from."""
    paths = [Path(config.data), *(p for p in (config.labels, config.embeddings, config.statistics) if p is not None)]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("**/*.*")))]
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()])


@lru_cache(maxsize=3)
def _prepare(key: _StaysKey) -> PreparedStays:
    config = key.config
    findings = Findings(Policy(drop_faulty=config.drop_faulty, strict=config.strict))
    source = read_once(config, key.files, findings, lambda: read_source(config, findings))
    if TRAIN not in source.splits:
        raise DataError(
            "no stays are left to train on",
            seen=f"{sum(len(s) for s in source.splits.values())} stays in all",
            do="give more stays, or smaller validation_share and test_share",
        )
    variables = find_statistics(config, source, findings)
    splits, variables = _transform(config, source.splits, variables)
    cuts = []
    for split, stays in splits.items():
        splits[split], lines = cut_to_settings(config, stays)
        cuts += [f"{split}: {line}" for line in lines]
    if config.summarise:  # Faults of the charted values have been counted above.
        variables = with_statistics_of_summary(variables, len(source.variables), splits[TRAIN], Findings())
    for split, stays in splits.items():
        splits[split] = normalise(stays, variables, clip=config.clip, place=f"{split} stays", findings=findings)
    about = [f"{split}: {describe_stays(stays)}" for split, stays in splits.items()]
    lines = [*about, f"variables: {len(variables) - 1}", *findings.lines(), *cuts]
    return PreparedStays(splits, variables, tuple(lines))


def _transform(
    config: SeqSetConfig, splits: Mapping[str, Stays], variables: Variables
) -> tuple[dict[str, Stays], Variables]:
    """The stays with values carried forward and summed up as the settings say, and the variables these bring along."""
    names, always = variables.names, numbers_of(variables, config.always_carry)
    count_from = len(variables) if config.carry_counts else None
    variables = with_counts(variables) if config.carry_counts else variables
    first = len(variables)
    variables = with_summary(variables, names, SUMMARY) if config.summarise else variables
    found: dict[str, Stays] = {}
    for split, stays in splits.items():
        known = cut_stays(stays, first_hours=config.first_hours)[0]
        if config.carry_minutes is not None:
            stays = carry_forward(stays, minutes=config.carry_minutes, always=always, count_from=count_from)
        if config.summarise:
            stays = cut_stays(stays, first_hours=config.first_hours)[0]
            stays = append_summary(stays, known, num_variables=len(names), first=first)
        found[split] = stays
    return found, variables


def find_statistics(config: SeqSetConfig, source: Source, findings: Findings) -> Variables:
    """The variables with mean and deviation: from the file, from the source itself, or from its training stays."""
    path = find_table(config, "statistics", "stats.csv")
    if source.has_statistics:
        return source.variables
    if path is not None:
        return read_statistics(source.variables, path, findings)
    return statistics_of(source.variables, source.splits[TRAIN], findings)


def cut_to_settings(config: SeqSetConfig, stays: Stays) -> tuple[Stays, list[str]]:
    """The stays as short as the settings say."""
    return cut_stays(
        stays,
        first_hours=config.first_hours,
        last_hours=config.last_hours,
        max_sets=config.max_sets,
        max_events=config.max_events,
    )


def stays_cut_at(config: SeqSetConfig, hours: float, split: str) -> Stays | None:
    """The stays of a split as they were known after so many hours, prepared like all others."""
    earlier = hours if config.first_hours is None else min(hours, config.first_hours)
    return prepare(replace(config, first_hours=earlier)).splits.get(split)


def describe_stays(stays: Stays) -> str:
    """Numbers of stays, sets, events and labels in one line."""
    labelled = stays.labels[stays.labels >= 0]
    risk = f"{(labelled == 1).mean():.1%} of {len(labelled):,} labels are 1" if len(labelled) else "no labels"
    events, sets = int(stays.num_events.sum()), int(stays.num_sets.sum())
    return f"{len(stays):,} stays, {sets:,} sets, {events:,} events; {risk}"
