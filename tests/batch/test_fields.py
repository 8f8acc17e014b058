"""Field declarations are checked where they are made."""

from __future__ import annotations

import pytest

from truebatch.batch.fields import Field, check_fields
from truebatch.errors import ConfigError


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"dtype": "int"}, "field 'x' has an unknown dtype\n  seen: dtype='int'\n.*'int64'"),
        ({"shift": -1}, "field 'x' cannot be shifted\n  seen: shift=-1, kind='along'"),
        ({"shift": 1, "kind": "once"}, "cannot be shifted\n  seen: shift=1, kind='once'"),
        ({"kind": "nested"}, "`inner` is for nested fields.*\n  seen: kind='nested', inner=''"),
        ({"inner": "events"}, "`inner` is for nested fields.*\n  seen: kind='along', inner='events'"),
        (
            {"least_cells": 4, "axis": "sets"},
            "cannot set a width.*\n  seen: least_cells=4, kind='along', axis='sets'",
        ),
        ({"blank": 0, "kind": "flat"}, "cannot have this `blank`\n  seen: blank=0, pad=0, kind='flat'"),
        ({"blank": -100}, "cannot have this `blank`\n  seen: blank=-100, pad=0, kind='along'"),
        ({"blank": float("nan"), "pad": float("nan")}, "cannot have this `blank`\n  seen: blank=nan, pad=nan"),
        ({"kind": "padded"}, "field 'x' has an unknown kind\n  seen: kind='padded'"),
        (
            {"kind": "nested", "axis": "sets", "inner": "sets"},
            "two levels need two names\n  seen: axis='sets', inner='sets'",
        ),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_with_its_value(declared, message):
    with pytest.raises(ConfigError, match=message):
        Field(name="x", **declared)


def test_a_name_is_declared_once_and_an_axis_used_in_one_way():
    with pytest.raises(ConfigError, match=r"declared twice: \['x'\]"):
        check_fields([Field(name="x"), Field(name="x", source="y")])
    with pytest.raises(ConfigError, match="no fields at all"):
        check_fields([])
    flat = Field(name="patches", kind="flat", axis="patches")
    with pytest.raises(
        ConfigError, match=r"axis 'patches' is used in two ways\n.*'y' uses it as cells of rows, another as flat"
    ):
        check_fields([flat, Field(name="y", axis="patches")])
    nested = [Field(name=n, kind="nested", axis=n, inner="events") for n in ("a", "b")]
    with pytest.raises(ConfigError, match="inner level of 'b', another as the inner level of 'a'"):
        check_fields(nested)


def test_a_field_is_read_from_its_source_or_its_name():
    assert Field(name="labels", source="input_ids").key == "input_ids"
    assert Field(name="labels").key == "labels"
