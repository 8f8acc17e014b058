"""Faults of data: what each is called, what becomes of it, and where it was seen. None is passed over in silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from truebatch.errors import DataError

Outcome = Literal["corrected", "dropped", "stops"]


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One way in which data can be wrong."""

    words: str
    fix: str
    """What is done where it is corrected, or could be done where it is not."""
    outcome: Outcome
    """corrected: always, and counted; dropped: with drop_faulty, and counted; stops: never corrected."""


KINDS: dict[str, FaultKind] = {
    "unknown_variable": FaultKind("an event of a variable nobody knows", "the event is left out", "dropped"),
    "unnamed": FaultKind("an event without the name of a variable", "the event is left out", "dropped"),
    "untrained_variable": FaultKind(
        "an event of a variable no training stay has", "the event is left out", "corrected"
    ),
    "not_finite": FaultKind("an event without a finite value", "the event is left out", "dropped"),
    "bad_time": FaultKind("an event without a finite time", "the event is left out", "dropped"),
    "negative_minute": FaultKind("an event before admission", "its time becomes minute 0", "corrected"),
    "unsorted": FaultKind("events that are not in order of time", "the stay is sorted by time", "corrected"),
    "duplicate": FaultKind("a variable twice in one set", "the last value is kept", "corrected"),
    "not_known": FaultKind("a descriptor that says it is not known", "the event is left out", "corrected"),
    "outlier": FaultKind(
        "a value farther from the mean than `clip` deviations", "it is cut to that limit", "corrected"
    ),
    "empty": FaultKind("a stay without events", "it holds the one event 'nothing charted'", "corrected"),
    "missing_label": FaultKind("a stay without a label", "it is kept, and no class is learned from it", "corrected"),
    "zero_std": FaultKind(
        "a variable with a standard deviation of 0",
        "that value counts as one deviation: what matters is that it was charted",
        "corrected",
    ),
    "no_statistics": FaultKind("a variable without mean and deviation", "0 and 1 are used", "corrected"),
    "two_times": FaultKind("a set with two times", "correct set_index, or leave that column out", "stops"),
    "bad_label": FaultKind("a label that is no class", "write classes as 0, 1, ...", "stops"),
    "unreadable": FaultKind("a file that cannot be read", "write or copy the file again", "stops"),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """Which faults end the reading."""

    drop_faulty: bool = False
    """Leave out events that cannot be corrected."""
    strict: bool = False
    """Stop at what could be corrected, too."""
    collect: bool = False
    """Stop at nothing: for a report on all faults."""

    def stops_at(self, kind: str) -> bool:
        """Whether this fault ends the reading."""
        outcome = KINDS[kind].outcome
        if outcome == "stops" or self.strict:
            return True
        return outcome == "dropped" and not self.drop_faulty


@dataclass(slots=True)
class Found:
    """How often a fault was seen, and where first."""

    number: int = 0
    stays: int = 0
    places: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """The faults of a dataset, as they are met."""

    policy: Policy = field(default_factory=Policy)
    found: dict[str, Found] = field(default_factory=dict)

    def note(self, kind: str, place: str, *, seen: str, number: int = 1) -> None:
        """Count a fault of one stay or file; raises where the policy says so, naming the place."""
        if self.policy.stops_at(kind) and not self.policy.collect:
            raise DataError(f"{place}: {KINDS[kind].words}", seen=seen, do=_advice(kind))
        entry = self.found.setdefault(kind, Found())
        entry.number += number
        entry.stays += 1
        if len(entry.places) < MOST_PLACES:
            entry.places.append(f"{place}: {seen}")

    def lines(self) -> list[str]:
        """One line for every kind of fault, for the start of a run."""
        return [
            f"{KINDS[kind].words}: {found.number:,} (in {found.stays:,} places, first {found.places[0]}); {done(kind)}"
            for kind, found in self.found.items()
        ]

    @property
    def stopping(self) -> list[str]:
        """Kinds that would end a run under this policy."""
        return [kind for kind in self.found if self.policy.stops_at(kind)]


MOST_PLACES = 5


def done(kind: str) -> str:
    """What becomes of a fault that does not stop the run."""
    return KINDS[kind].fix


def _advice(kind: str) -> str:
    fault = KINDS[kind]
    ways: dict[Outcome, Callable[[], str]] = {
        "stops": lambda: fault.fix,
        "dropped": lambda: f"correct it, or set drop_faulty=true: {fault.fix}, and counted",
        "corrected": lambda: f"correct it, or leave strict out: {fault.fix}, and counted",
    }
    return ways[fault.outcome]()
