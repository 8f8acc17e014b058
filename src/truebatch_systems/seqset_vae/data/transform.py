"""Shorten stays by whole sets: what was known after some hours, a window of time, or the most recent part.

Carry values forward: at every set, what was last known of each variable, as far as it is not too old. Or sum a stay up:
one more set at its end, with how often each variable was charted and its last, mean, lowest and highest value.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest
from truebatch.planning.rows import Ints
from truebatch_systems.seqset_vae.data.admissions import NOTHING, Stays, make_stays
from truebatch_systems.seqset_vae.data.variables import Variables


def cut_stays(
    stays: Stays,
    *,
    first_hours: float | None = None,
    last_hours: float | None = None,
    max_sets: int | None = None,
    max_events: int | None = None,
) -> tuple[Stays, list[str]]:
    """The stays with the sets these limits leave, and one line for each limit that took something.

    Sets before `first_hours` are what was known at that time; of those, the ones of the last `last_hours` before the
    newest; of those, the most recent ones up to `max_sets` and `max_events`. A set is kept whole or not at all. A stay
    that loses everything to `first_hours` holds the event "nothing charted"; the newest set always stays otherwise, and
    one larger than `max_events` is an error.
    """
    lines: list[str] = []
    for name, limit, keep in (
        ("first_hours", first_hours, _before),
        ("last_hours", last_hours, _recent),
        ("max_sets", max_sets, _newest_sets),
        ("max_events", max_events, _newest_events),
    ):
        if limit is not None:
            is_kept = keep(stays, limit)
            if not is_kept.all():
                lines.append(_say(stays, is_kept, f"{name}={limit:g}"))
                stays = keep_sets(stays, is_kept)
    return stays, lines


def keep_sets(stays: Stays, is_kept: NDArray[np.bool_]) -> Stays:
    """The stays with only these sets; a stay that would have none left holds the event "nothing charted"."""
    owner = _owner(stays)
    left = np.bincount(owner[is_kept], minlength=len(stays))
    event_kept = np.repeat(is_kept, stays.set_size)
    var, val = stays.var[event_kept], stays.val[event_kept]
    minute, size = stays.set_minute[is_kept], stays.set_size[is_kept]
    empty = np.flatnonzero(left == 0)
    events = np.bincount(np.repeat(owner, stays.set_size)[event_kept], minlength=len(stays))
    sets_before = (np.cumsum(left) - left)[empty]
    events_before = (np.cumsum(events) - events)[empty]
    left[empty], events[empty] = 1, 1
    return replace(
        stays,
        starts=np.append(0, np.cumsum(events)).astype(np.int64),
        set_starts=np.append(0, np.cumsum(left)).astype(np.int64),
        var=np.insert(var, events_before, NOTHING).astype(np.int32),
        val=np.insert(val, events_before, 0.0).astype(np.float32),
        set_minute=np.insert(minute, sets_before, 0.0).astype(np.float32),
        set_size=np.insert(size, sets_before, 1).astype(np.int32),
    )


def _owner(stays: Stays) -> Ints:
    """[sets] the stay of every set."""
    return np.repeat(np.arange(len(stays), dtype=np.int64), stays.num_sets)


def _before(stays: Stays, hours: float) -> NDArray[np.bool_]:
    kept: NDArray[np.bool_] = stays.set_minute < hours * 60
    return kept


def _recent(stays: Stays, hours: float) -> NDArray[np.bool_]:
    newest = stays.set_minute[stays.set_starts[1:] - 1]
    kept: NDArray[np.bool_] = stays.set_minute > np.repeat(newest, stays.num_sets) - hours * 60
    return kept


def _newest_sets(stays: Stays, most: float) -> NDArray[np.bool_]:
    behind = np.repeat(stays.set_starts[1:], stays.num_sets) - np.arange(len(stays.set_size))
    kept: NDArray[np.bool_] = behind <= most
    return kept


def _newest_events(stays: Stays, most: float) -> NDArray[np.bool_]:
    before = np.cumsum(stays.set_size) - stays.set_size  # events of all stays before each set
    behind = np.repeat(stays.starts[1:], stays.num_sets) - before
    kept: NDArray[np.bool_] = behind <= most
    newest = stays.set_starts[1:] - 1
    too_large = np.flatnonzero(~kept[newest])
    if len(too_large):
        at = int(too_large[0])
        raise ConfigError(
            f"stay {stays.ids[at]!r} has a last set larger than max_events, and sets are never cut",
            seen=f"{stays.set_size[newest[at]]} events in the set, max_events={most:g}",
            do=f"set max_events to at least {int(stays.set_size[newest].max())}",
        )
    return kept


def _say(stays: Stays, is_kept: NDArray[np.bool_], limit: str) -> str:
    owner = _owner(stays)[~is_kept]
    events = int(stays.set_size[~is_kept].sum())
    return f"{limit}: {len(np.unique(owner)):,} of {len(stays):,} stays shortened by {len(owner):,} sets ({events:,} events)"


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """The events of one stay with those carried forward, sorted by set, then variable."""

    set_id: Ints
    var: Ints
    val: NDArray[np.float32]
    age: NDArray[np.float32]
    """[n] minutes since it was observed."""
    is_carry: NDArray[np.bool_]
    """[n] True where the value was observed in an earlier set."""
    number: Ints
    """[n] how often its variable was observed so far."""


def carry_forward(
    stays: Stays, *, minutes: float, always: Collection[int] = (), count_from: int | None = None
) -> Stays:
    """The stays with every variable copied into later sets until it is observed again or older than `minutes`.

    Variables in `always` are copied however old they are. Set times stay as they are. With `count_from`, variable v
    brings along the event v + count_from: the logarithm of how often it was observed so far.
    """
    return make_stays(
        _filled(stays[i], carry_stay(stays[i], minutes=minutes, always=always), count_from) for i in range(len(stays))
    )


def carry_stay(sample: dict[str, Any], *, minutes: float, always: Collection[int] = ()) -> Carried:
    """The events of one stay with those carried forward."""
    var, set_id, times = sample["var"], sample["set_id"], sample["set_minute"]
    kinds = np.unique(var[var != NOTHING])
    number = len(times)
    observed = np.full((len(kinds), number), -1, dtype=np.int64)  # the event of each variable in each set
    real = np.flatnonzero(var != NOTHING)
    observed[np.searchsorted(kinds, var[real]), set_id[real]] = real
    latest = np.where(observed >= 0, np.arange(number), -1)
    latest = np.maximum.accumulate(latest, axis=1)  # the set in which each variable was last observed
    age = times[None, :] - times[np.maximum(latest, 0)]
    is_lasting = np.isin(kinds, np.array(sorted(always), dtype=np.int64))[:, None]
    is_there = (latest >= 0) & ((age <= minutes) | is_lasting)
    which, at = np.nonzero(is_there)
    source = observed[which, latest[which, at]]
    order = np.lexsort((kinds[which], at))
    which, at, source = which[order], at[order], source[order]
    times_seen = np.cumsum(observed >= 0, axis=1)[which, at]
    carried = Carried(
        at,
        kinds[which],
        sample["val"][source],
        age[which, at].astype(np.float32),
        latest[which, at] != at,
        times_seen.astype(np.int64),
    )
    return carried if len(at) else _nothing(sample)


def numbers_of(variables: Variables, names: Collection[str]) -> list[int]:
    """The numbers of variables named in `always_carry`; a name that is none raises `ConfigError`."""
    known = variables.numbers()
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ConfigError(
            f"always_carry names a variable nobody knows{nearest(wrong[0], list(known))}",
            seen=f"{wrong[0]!r}; {len(known) - 1} variables are known",
            do="write the name as it stands in the data",
        )
    return [known[name] for name in names]


def _nothing(sample: dict[str, Any]) -> Carried:
    """A stay of nothing keeps its one event."""
    zeros = np.zeros(len(sample["var"]), dtype=np.float32)
    return Carried(
        sample["set_id"], sample["var"], sample["val"], zeros, zeros > 0, np.ones(len(zeros), dtype=np.int64)
    )


def _filled(sample: dict[str, Any], carried: Carried, count_from: int | None) -> dict[str, Any]:
    set_id, var, val = carried.set_id, carried.var, carried.val
    if count_from is not None and var[0] != NOTHING:
        order = np.argsort(np.concatenate([set_id, set_id]), kind="stable")
        set_id = np.concatenate([set_id, set_id])[order]
        var = np.concatenate([var, var + count_from])[order]
        val = np.concatenate([val, np.log(carried.number).astype(np.float32)])[order]
    return {**sample, "var": var, "val": val, "set_size": np.bincount(set_id, minlength=len(sample["set_minute"]))}


SUMMARY = ("times charted", "last value", "mean", "lowest", "highest")


def append_summary(stays: Stays, known: Stays, *, num_variables: int, first: int) -> Stays:
    """The stays with one more set at their end that sums up what is `known` of them, at the time of the newest set.

    Variable v brings along up to five events, numbered v + first + k * num_variables for the k-th of `SUMMARY`: the
    logarithm of how often it was charted, its last value, and the other three where it was charted more than once.
    """
    owner, var, values = _summary_events(known, num_variables, first)
    sizes = np.bincount(owner, minlength=len(stays))
    has = sizes > 0
    newest = stays.set_minute[stays.set_starts[1:] - 1]
    return replace(
        stays,
        starts=stays.starts + np.append(0, np.cumsum(sizes)),
        set_starts=stays.set_starts + np.append(0, np.cumsum(has)),
        var=np.insert(stays.var, stays.starts[1:][owner], var).astype(np.int32),
        val=np.insert(stays.val, stays.starts[1:][owner], values).astype(np.float32),
        set_minute=np.insert(stays.set_minute, stays.set_starts[1:][has], newest[has]).astype(np.float32),
        set_size=np.insert(stays.set_size, stays.set_starts[1:][has], sizes[has]).astype(np.int32),
    )


def _summary_events(stays: Stays, num_variables: int, first: int) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Stay, variable and value of every event of the summaries, stay after stay."""
    at = np.flatnonzero(stays.var != NOTHING)
    of_event = np.repeat(np.arange(len(stays), dtype=np.int64), stays.num_events)[at]
    key = of_event * num_variables + stays.var[at]
    order = np.argsort(key, kind="stable")
    values = stays.val[at][order].astype(np.float64)
    pairs, starts, counts = np.unique(key[order], return_index=True, return_counts=True)
    if not len(pairs):
        return pairs, pairs, values
    ends = np.append(starts[1:], len(values))
    columns = np.stack(
        [
            np.log(counts),
            values[ends - 1],
            np.add.reduceat(values, starts) / counts,
            np.minimum.reduceat(values, starts),
            np.maximum.reduceat(values, starts),
        ],
        axis=1,
    )
    is_there = np.ones(columns.shape, dtype=bool)
    is_there[:, 2:] = counts[:, None] > 1
    which, kind = np.nonzero(is_there)
    var = pairs[which] % num_variables + first + kind * num_variables
    return pairs[which] // num_variables, var, columns[which, kind]
