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


def carry_forward(stays: Stays, *, minutes: float, always: Collection[int] = ()) -> Stays:
    """The stays with every variable copied into later sets until it is observed again or older than `minutes`.

    Variables in `always` are copied however old they are. Set times stay as they are.
    """
    return make_stays(
        _filled(stays[i], carry_stay(stays[i], minutes=minutes, always=always)) for i in range(len(stays))
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
    is_carry = latest[which, at] != at
    carried = Carried(at, kinds[which], sample["val"][source], age[which, at].astype(np.float32), is_carry)
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
    return Carried(sample["set_id"], sample["var"], sample["val"], zeros, zeros > 0)


def _filled(sample: dict[str, Any], carried: Carried) -> dict[str, Any]:
    sizes = np.bincount(carried.set_id, minlength=len(sample["set_minute"]))
    return {**sample, "var": carried.var, "val": carried.val, "set_size": sizes}
