"""Carry values forward: at every set, what was last known of each variable, as far as it is not too old."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import ConfigError
from truebatch.planning.rows import Ints
from truebatch.systems.seqset_vae.stays import NOTHING, Stays, make_stays
from truebatch.systems.seqset_vae.variables import Variables
from truebatch.textfiles import nearest


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
