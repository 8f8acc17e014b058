"""Shorten stays by whole sets: what was known after some hours, a window of time, or the most recent part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import ConfigError
from truebatch.planning.rows import Ints
from truebatch.systems.seqset_vae.stays import NOTHING, Stays


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
