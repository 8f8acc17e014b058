"""Real persons by name: liver patients and controls of Olmsted County, from the PyPI package `survival`.

Everything up to the index day is known, and the question is who dies within five years of it. Later events, and how
long a person was followed, would give the answer away and are not read.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import DataError
from truebatch_systems.seqset_vae.data.admissions import Stays, make_stays
from truebatch_systems.seqset_vae.data.variables import Variables, name_variables

HORIZON_DAYS = 1826
COPIES = ("chol", "dbp")
"""Columns of the package that repeat others (hdl, sbp) value by value."""
LIMITS = {"sbp": (50.0, 300.0)}
"""Typing errors are moved to the nearest value a living person can have."""
PERSON = ("age", "male", "weight", "height", "bmi")
DAY = 1440.0


def load_nafld(*, width: int) -> tuple[Stays, Variables]:
    """Persons whose state after five years is known, with raw values; label 1 died within them."""
    people, tests, diagnoses = (_columns(name) for name in ("nafld1", "nafld2", "nafld3"))
    died = (people["status"] == 1) & (people["futime"] <= HORIZON_DAYS)
    is_known = died | (people["futime"] >= HORIZON_DAYS)
    person, day, name, value = _events(people, tests, diagnoses)
    names = sorted(set(name.tolist()))
    variables = name_variables(names, width=width)
    var = np.searchsorted(np.array(names), name) + 1
    order = np.lexsort((var, day, person))
    # Of one test on one day, the last is kept, as in any other stay.
    last = np.append(np.any(np.diff(np.stack([person, day, var])[:, order], axis=1) != 0, axis=0), True)
    order = order[last]
    starts = np.searchsorted(person[order], people["id"], side="left")
    ends = np.searchsorted(person[order], people["id"], side="right")
    stays = [
        _stay(int(people["id"][i]), int(died[i]), *(column[order[starts[i] : ends[i]]] for column in (day, var, value)))
        for i in np.flatnonzero(is_known)
    ]
    return make_stays(stays), variables


def _events(
    people: dict[str, Any], tests: dict[str, Any], diagnoses: dict[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.str_], NDArray[np.float64]]:
    """Person, day, variable and value of everything up to the index day."""
    parts = [(tests["id"], tests["days"], tests["test"], tests["value"])]
    parts += [(diagnoses["id"], diagnoses["days"], diagnoses["event"], np.ones(len(diagnoses["id"])))]
    number = len(people["id"])
    parts += [(people["id"], np.zeros(number), np.full(number, name), people[name]) for name in PERSON]
    person, day, name, value = (np.concatenate([part[k] for part in parts]) for k in range(4))
    keep = (day <= 0) & np.isfinite(day) & np.isfinite(value) & ~np.isin(name, COPIES)
    person, day, name, value = person[keep].astype(np.int64), day[keep], name[keep].astype(str), value[keep]
    for test, (least, most) in LIMITS.items():
        value = np.where(name == test, np.clip(value, least, most), value)
    return person, day, name, value


def _stay(person: int, label: int, day: Any, var: Any, value: Any) -> dict[str, Any]:
    days, sizes = np.unique(day, return_counts=True)
    minutes = (days - days[0]) * DAY
    return {"id": str(person), "label": label, "var": var, "val": value, "set_minute": minutes, "set_size": sizes}


def _columns(name: str) -> dict[str, NDArray[Any]]:
    try:
        datasets = importlib.import_module("survival.datasets")
        table = getattr(datasets, f"load_{name}")()
    except (ImportError, AttributeError) as error:
        raise DataError(
            "the data 'nafld' comes with the package survival, which is not installed",
            seen=str(error),
            do="pip install 'survival>=2.0'",
        ) from error
    return {key: _array(column) for key, column in table.items()}


def _array(column: Any) -> NDArray[Any]:
    if any(isinstance(value, str) for value in column[:1]):
        return np.array(column)
    return np.array([np.nan if value is None else value for value in column], dtype=np.float64)
