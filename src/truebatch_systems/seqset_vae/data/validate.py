"""A report on a dataset before anything is trained: every fault, how often, where first, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import Stays
from truebatch_systems.seqset_vae.data.faults import KINDS, Findings, Policy, done
from truebatch_systems.seqset_vae.data.labels import TRAIN
from truebatch_systems.seqset_vae.data.prepare import describe_stays, find_statistics
from truebatch_systems.seqset_vae.data.read import Source, read_source
from truebatch_systems.seqset_vae.data.variables import normalise


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """What was found."""

    splits: dict[str, str]
    """Split -> its stays, sets, events and labels in one line."""
    shapes: dict[str, tuple[float, ...]]
    """What -> minimum, median, 95th percentile and maximum."""
    faults: tuple[dict[str, Any], ...]
    """One for each kind: fault, number, places, outcome, first, do."""
    stops: tuple[str, ...]
    """Kinds of faults that a run would stop at."""

    @property
    def is_usable(self) -> bool:
        """Whether a run would start on these data."""
        return not self.stops and TRAIN in self.splits


def validate(config: SeqSetConfig) -> Validation:
    """Read everything the settings name and stop at nothing that can be reported."""
    findings = Findings(Policy(drop_faulty=config.drop_faulty, strict=config.strict, collect=True))
    source = read_source(config, findings)
    if TRAIN in source.splits:
        variables = find_statistics(config, source, findings)
        for split, stays in source.splits.items():
            normalise(stays, variables, clip=config.clip, place=f"{split} stays", findings=findings)
    return Validation(
        splits={split: describe_stays(stays) for split, stays in source.splits.items()},
        shapes=_shapes(source),
        faults=tuple(_row(findings, kind) for kind in findings.found),
        stops=tuple(findings.stopping),
    )


def _shapes(source: Source) -> dict[str, tuple[float, ...]]:
    stays: list[Stays] = list(source.splits.values())
    columns: dict[str, list[Any]] = {
        "events of a stay": [one.num_events for one in stays],
        "sets of a stay": [one.num_sets for one in stays],
        "events of a set": [one.set_size for one in stays],
        "hours of a stay": [one.set_minute[one.set_starts[1:] - 1] / 60 for one in stays],
    }
    joined = {name: np.concatenate(parts) for name, parts in columns.items() if parts}
    return {name: tuple(float(q) for q in np.percentile(values, [0, 50, 95, 100])) for name, values in joined.items()}


def _row(findings: Findings, kind: str) -> dict[str, Any]:
    found, is_stopping = findings.found[kind], kind in findings.stopping
    return {
        "fault": kind,
        "words": KINDS[kind].words,
        "number": found.number,
        "places": found.stays,
        "outcome": "stops a run" if is_stopping else done(kind),
        "first": list(found.places),
    }
