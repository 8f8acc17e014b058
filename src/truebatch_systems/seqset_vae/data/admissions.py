"""Stays in memory: flat arrays over all events and all sets, a sample cut out of them when it is asked for.

A sample maps `var`, `val`, `minute`, `set_id` to one entry an event, `set_minute` and `set_size` to one entry a set,
and has a `label` (-1: none) and an `id`. Events are sorted by time, then by set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.batch.fields import Field
from truebatch.errors import DataError
from truebatch.io.atomic_files import atomic_folder
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.rows import Ints

Floats = NDArray[np.float32]

NOTHING = 0
"""The variable of a stay in which nothing was charted: one event of value 0, so that no stay is without a set."""
UNLABELLED = -1
SETS = "sets"
"""The axis of a micro-batch along which the sets of a stay lie; its events lie along `cells`."""

FIELDS = (
    Field(name="var", dtype="int64"),
    Field(name="val", dtype="float32"),
    Field(name="minute", dtype="float32"),
    Field(name="set_id", dtype="int64"),
    Field(name="set_minute", axis=SETS, dtype="float32"),
    Field(name="set_size", axis=SETS, dtype="int64"),
    Field(name="host_set_size", source="set_size", kind="flat", axis="flat_sets", dtype="int64", host=True),
    Field(name="label", kind="once", dtype="int64"),
)


def stay_fields(*, least_events: int = 0) -> tuple[Field, ...]:
    """How a micro-batch holds stays; padded to at least `least_events` events, the fixed padding of the original script."""
    return tuple(replace(f, least_cells=least_events) if f.name == "var" else f for f in FIELDS)


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """A dataset of stays. Arrays may be mapped from a file; a sample is a copy."""

    ids: tuple[str, ...]
    labels: Ints
    """[N] the class, or -1."""
    starts: Ints
    """[N + 1] events starts[i] to starts[i + 1] belong to stay i."""
    set_starts: Ints
    """[N + 1] sets set_starts[i] to set_starts[i + 1] belong to stay i."""
    var: NDArray[np.int32]
    """[events] the variable; 0 is NOTHING."""
    val: Floats
    """[events] the normalised value."""
    set_minute: Floats
    """[sets] minutes since admission."""
    set_size: NDArray[np.int32]
    """[sets] events of the set, 1 or more."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, sample_id: int, /) -> dict[str, Any]:
        if not 0 <= sample_id < len(self):
            raise IndexError(sample_id)
        events = slice(self.starts[sample_id], self.starts[sample_id + 1])
        sets = slice(self.set_starts[sample_id], self.set_starts[sample_id + 1])
        sizes = np.array(self.set_size[sets], dtype=np.int64)
        minutes = np.array(self.set_minute[sets], dtype=np.float32)
        return {
            "id": self.ids[sample_id],
            "label": self.labels[sample_id],
            "var": np.array(self.var[events], dtype=np.int64),
            "val": np.array(self.val[events], dtype=np.float32),
            "minute": np.repeat(minutes, sizes),
            "set_id": np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
            "set_minute": minutes,
            "set_size": sizes,
        }

    @property
    def num_events(self) -> Ints:
        """[N] events of every stay."""
        found: Ints = np.diff(self.starts)
        return found

    @property
    def num_sets(self) -> Ints:
        """[N] sets of every stay."""
        found: Ints = np.diff(self.set_starts)
        return found


def measure_stays(stays: Stays, counts: Mapping[str, Ints] | None = None) -> Measured:
    """Events as the length; sets and the pairs of both attentions as further costs."""
    squares = np.concatenate([[0], np.cumsum(stays.set_size.astype(np.int64) ** 2)])
    costs = {
        "sets": stays.num_sets.astype(np.int64),
        "set_pairs": (squares[stays.set_starts[1:]] - squares[stays.set_starts[:-1]]).astype(np.int64),
        "stay_pairs": stays.num_sets.astype(np.int64) ** 2,
    }
    return Measured(
        lengths=stays.num_events.astype(np.int64),
        costs=costs,
        counts=dict(counts or {}),
        ids=stays.ids,
        unit="events",
        found="events of every stay",
    )


def make_stays(samples: Iterable[Mapping[str, Any]]) -> Stays:
    """Flat arrays from samples; only `id`, `label`, `var`, `val`, `set_minute` and `set_size` are read."""
    found = list(samples)

    def joined(name: str, dtype: Any) -> Any:
        return np.concatenate([np.asarray(s[name], dtype=dtype) for s in found] or [np.zeros(0, dtype=dtype)])

    def starts(name: str) -> Ints:
        return np.cumsum([0, *(len(s[name]) for s in found)]).astype(np.int64)

    return Stays(
        ids=tuple(str(s["id"]) for s in found),
        labels=np.array([int(s["label"]) for s in found], dtype=np.int64),
        starts=starts("var"),
        set_starts=starts("set_minute"),
        var=joined("var", np.int32),
        val=joined("val", np.float32),
        set_minute=joined("set_minute", np.float32),
        set_size=joined("set_size", np.int32),
    )


def take_stays(stays: Stays, keep: Sequence[int] | Ints) -> Stays:
    """The named stays, in that order."""
    return make_stays(stays[int(i)] for i in keep)


def with_labels(stays: Stays, labels: Ints) -> Stays:
    """The same stays with other labels."""
    return replace(stays, labels=np.asarray(labels, dtype=np.int64))


def save_stays(stays: Stays, folder: Path) -> None:
    """Write the arrays into `folder`, in one move: a reader sees all of them or none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as draft:
            for f in fields(Stays):
                if f.name != "ids":
                    np.save(draft / f"{f.name}.npy", np.ascontiguousarray(getattr(stays, f.name)), allow_pickle=False)
            (draft / "ids.json").write_text(json.dumps(stays.ids), encoding="utf-8")
    except OSError as error:
        raise DataError(
            "the stays cannot be kept", seen=f"{folder}: {error}", do="name a folder that can be written to"
        ) from error


def open_stays(folder: Path) -> Stays | None:
    """What was saved in `folder`, mapped from its files; None if nothing was, or it is damaged."""
    try:
        ids = tuple(json.loads((folder / "ids.json").read_text(encoding="utf-8")))
        names = [f.name for f in fields(Stays) if f.name != "ids"]
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
        found = Stays(ids=ids, **arrays)
    except (OSError, ValueError, EOFError):
        return None  # Reading the source again replaces it; nothing is lost but time.
    is_whole = len(found.starts) == len(ids) + 1 and found.starts[-1] == len(found.var) == len(found.val)
    return found if is_whole and found.set_starts[-1] == len(found.set_size) else None
