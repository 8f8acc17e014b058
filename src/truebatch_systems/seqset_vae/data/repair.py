"""From the events of a file to a stay: faults found, corrected where that is right, and counted.

events -> known variables, finite values and times -> sets in order of time -> each variable once a set -> sample
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from truebatch.planning.rows import Ints
from truebatch_systems.seqset_vae.data.admissions import NOTHING
from truebatch_systems.seqset_vae.data.event_tables import Events
from truebatch_systems.seqset_vae.data.faults import Findings

Numbers = dict[str, int]
"""Variable name -> number."""
Unknown = Literal["unknown_variable", "untrained_variable", "learn"]


def repair_stay(
    name: str, events: Events, numbers: Numbers, findings: Findings, *, unknown: Unknown = "unknown_variable"
) -> dict[str, Any]:
    """A sample without a label, its values as they stand in the file.

    The order of rows within a set never matters, except that the last of two values of a variable is kept.
    `unknown` is the fault that a variable without a number is; "learn" gives it the next number instead.
    """
    events = _drop(events, events.variable == "", "unnamed", events.variable, findings)
    if unknown == "learn":
        for variable in dict.fromkeys(events.variable.tolist()):
            numbers.setdefault(variable, len(numbers))
    else:
        events = _drop(events, _unknown(events, numbers), unknown, events.variable, findings)
    events = _drop(events, ~np.isfinite(events.value), "not_finite", events.value, findings)
    events = _drop(events, ~np.isfinite(events.minute), "bad_time", events.minute, findings)
    events = _clamp(_sorted(events, findings), findings)
    if not len(events):
        findings.note("empty", str(events.path), seen=f"stay {name!r} has no events")
        return {"id": name, "var": [NOTHING], "val": [0.0], "set_minute": [0.0], "set_size": [1]}
    var = np.array([numbers[variable] for variable in events.variable], dtype=np.int64)
    sets = _number_sets(events, findings)
    keep = _last_of_each(sets, var, events, findings)
    sets, var, events = sets[keep], var[keep], events.take(keep)
    _, first, sizes = np.unique(sets, return_index=True, return_counts=True)
    return {"id": name, "var": var, "val": events.value, "set_minute": events.minute[first], "set_size": sizes}


def _unknown(events: Events, numbers: Numbers) -> NDArray[np.bool_]:
    return np.array([variable not in numbers for variable in events.variable], dtype=bool)


def _drop(events: Events, is_bad: NDArray[np.bool_], kind: str, shown: NDArray[Any], findings: Findings) -> Events:
    bad = np.flatnonzero(is_bad)
    if not len(bad):
        return events
    at = int(bad[0])
    is_number = shown.dtype.kind == "f"
    seen = f"variable {str(events.variable[at])!r}" + (f", {shown[at]:g}" if is_number else "")
    findings.note(kind, events.place(at), seen=seen, number=len(bad))
    return events.take(np.flatnonzero(~is_bad))


def _sorted(events: Events, findings: Findings) -> Events:
    back = np.flatnonzero(np.diff(events.minute) < 0)
    if not len(back):
        return events
    at = int(back[0]) + 1
    seen = f"minute {events.minute[at]:g} after minute {events.minute[at - 1]:g}"
    findings.note("unsorted", events.place(at), seen=seen, number=len(back))
    return events.take(np.argsort(events.minute, kind="stable"))


def _clamp(events: Events, findings: Findings) -> Events:
    early = np.flatnonzero(events.minute < 0)
    if not len(early):
        return events
    at = int(early[0])
    findings.note("negative_minute", events.place(at), seen=f"minute {events.minute[at]:g}", number=len(early))
    return replace(events, minute=np.maximum(events.minute, 0.0))


def _number_sets(events: Events, findings: Findings) -> Ints:
    """[n] the set of every event, numbered in order of time: by set_index, or else all events of one time."""
    keys = [events.minute] if events.set_index is None else [events.minute, events.set_index.astype(np.float64)]
    _, sets = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
    if events.set_index is not None:
        _check_one_time(events, events.set_index, findings)
    found: Ints = sets.reshape(-1).astype(np.int64)
    return found


def _check_one_time(events: Events, index: Ints, findings: Findings) -> None:
    order = np.argsort(index, kind="stable")
    is_same_set = np.diff(index[order]) == 0
    wrong = np.flatnonzero(is_same_set & (np.diff(events.minute[order]) != 0))
    if len(wrong):
        one, other = (int(order[wrong[0] + step]) for step in (0, 1))
        seen = f"set_index {index[one]}: minute {events.minute[one]:g} and minute {events.minute[other]:g}"
        findings.note("two_times", events.place(other), seen=seen, number=len(wrong))


def _last_of_each(sets: Ints, var: Ints, events: Events, findings: Findings) -> Ints:
    """Places of the events to keep, sorted by set, then variable: of equal ones the last in the file."""
    order = np.lexsort((np.arange(len(sets)), var, sets))
    is_again = (np.diff(sets[order]) == 0) & (np.diff(var[order]) == 0)
    twice = np.flatnonzero(is_again)
    if len(twice):
        at = int(order[twice[0] + 1])
        seen = f"variable {events.variable[at]!r} at minute {events.minute[at]:g}"
        findings.note("duplicate", events.place(at), seen=seen, number=len(twice))
    kept: Ints = order[np.append(~is_again, True)]
    return kept
