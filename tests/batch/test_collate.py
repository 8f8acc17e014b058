"""Collate, compared with a slow writer that goes cell by cell."""

from __future__ import annotations

import copy
import pickle
import socket
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import rows_of
from truebatch.batch.collate import _row_axis, _rows_axis, collate
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.shared_memory import receive_object, send_object
from truebatch.errors import BatchError, ConfigError
from truebatch.planning.rows import Rows, packed_row, padded_rows

ALONG = Field(name="ids", pad=-7)


def fields_with(shift: int, pad: int, dtype: str) -> tuple[Field, ...]:
    return (
        Field(name="ids", pad=pad, dtype=dtype),
        Field(name="labels", source="ids", shift=shift, pad=-100, blank=-100),
        Field(name="vectors", pad=0.5),
        Field(name="patches", kind="flat", axis="patches"),
        Field(name="label", kind="once"),
        Field(name="minute", axis="sets", pad=-1),
        Field(name="events", kind="nested", axis="sets", inner="events", pad=9),
    )


@st.composite
def ragged(draw) -> list[dict[str, list]]:
    """Samples as plain lists."""
    number = st.integers(-99, 99)
    samples = []
    for _ in range(draw(st.integers(0, 6))):
        length, sets = draw(st.integers(0, 6)), draw(st.integers(0, 3))
        samples.append(
            {
                "ids": draw(st.lists(number, min_size=length, max_size=length)),
                "vectors": [[float(draw(number)), 0.25] for _ in range(length)],
                "patches": draw(st.lists(number, max_size=4)),
                "label": [draw(number), draw(number)],
                "minute": draw(st.lists(number, min_size=sets, max_size=sets)),
                "events": [draw(st.lists(number, min_size=1, max_size=4)) for _ in range(sets)],
            }
        )
    return samples


@st.composite
def placed(draw, lengths: list[int]) -> Rows:
    """Rows of either layout for samples of these lengths, with sample ids that are not their places."""
    ids = [100 - 3 * i for i in range(len(lengths))]
    extra = draw(st.integers(0, 3))
    if draw(st.booleans()):
        return padded_rows(np.array(ids), max(lengths, default=0) + extra)
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=3)))
    starts = [0, *cuts, len(ids)] if ids else [0]
    used = [sum(lengths[a:b]) for a, b in pairwise(starts)]
    return Rows(np.array(ids, dtype=np.int64), np.array(starts), max(used, default=0) + extra, "packed")


def in_some_form(value: Any, form: str) -> Any:
    if form == "list" or (
        isinstance(value, list) and value and isinstance(value[0], list) and len(set(map(len, value))) > 1
    ):
        return value
    array = np.array(value, dtype=np.float32 if np.array(value).dtype.kind == "f" and len(value) else np.int64)
    return array if form == "array" else torch.from_numpy(array)


def cell_by_cell(values: list[list], rows: Rows, *, pad: Any, side: str, width: int | None = None) -> list[list]:
    """The rows of one field, written as one would by hand."""
    table = []
    at = 0
    for b in range(rows.num_rows):
        row: list = []
        for _ in rows.row(b):
            row += values[at]
            at += 1
        table.append(row)
    width = max(map(len, table), default=0) if width is None else width
    empty = [[pad] * (width - len(row)) for row in table]
    is_left = side == "left" and rows.layout == "padded"
    return [e + row if is_left else row + e for row, e in zip(table, empty, strict=True)]


def joined(lists: list[list]) -> list:
    return [x for part in lists for x in part]


def shifted(value: list, shift: int, pad: int) -> list:
    return [value[t + shift] if t + shift < len(value) else pad for t in range(len(value))]


@settings(deadline=None, max_examples=120)
@given(st.data(), ragged(), st.sampled_from(["left", "right"]), st.integers(0, 3), st.integers(-5, 5))
def test_every_cell_holds_what_a_slow_writer_puts_there(data, samples, side, shift, pad):
    rows = data.draw(placed([len(s["ids"]) for s in samples]))
    dtype = data.draw(st.sampled_from(["keep", "int32", "float64"]))
    forms = st.sampled_from(["list", "array", "tensor"])
    given_as = [{k: in_some_form(v, data.draw(forms)) for k, v in s.items()} for s in samples]
    batch = collate(given_as, rows, fields_with(shift, pad, dtype), side=side, counts={"x": 3})

    column = {k: [s[k] for s in samples] for k in ("ids", "vectors", "patches", "label", "minute", "events")}
    laid = {"rows": rows, "side": side}
    assert batch["ids"].tolist() == cell_by_cell(column["ids"], **laid, pad=pad, width=rows.width)
    labels = [shifted(v, shift, -100) for v in column["ids"]]
    assert batch["labels"].tolist() == cell_by_cell(labels, **laid, pad=-100, width=rows.width)
    cells = joined(batch["labels"].tolist())
    assert batch.filled_cells("labels").tolist() == [at for at, label in enumerate(cells) if label != -100]
    if any(column["vectors"]):
        assert batch["vectors"].tolist() == cell_by_cell(column["vectors"], **laid, pad=[0.5, 0.5], width=rows.width)
    assert batch["patches"].tolist() == joined(column["patches"])
    assert batch["label"].tolist() == column["label"]
    assert batch["minute"].tolist() == cell_by_cell(column["minute"], **laid, pad=-1)
    sets = joined(column["events"])
    widest = max(map(len, sets), default=0)
    assert batch["events"].tolist() == [s + [9] * (widest - len(s)) for s in sets]

    assert batch.sample_ids == tuple(rows.ids.tolist())
    assert batch.counts == {"x": 3}
    if any(column["ids"]):
        assert batch["ids"].dtype == (torch.int64 if dtype == "keep" else getattr(torch, dtype))
    assert_places(batch, [len(v) for v in column["ids"]], rows, side)


def assert_places(batch: MicroBatch, lengths: list[int], rows: Rows, side: str) -> None:
    places = {"rows": rows, "side": side, "pad": 0, "width": rows.width}
    number = [k + 1 for b in range(rows.num_rows) for k in range(len(rows.row(b)))]
    segment_ids = cell_by_cell([[k] * n for k, n in zip(number, lengths, strict=True)], **places)
    assert batch.rows().segment_ids.tolist() == segment_ids
    assert batch.positions.tolist() == cell_by_cell([list(range(n)) for n in lengths], **places)
    assert batch.is_real.tolist() == [[k > 0 for k in row] for row in segment_ids]
    assert batch.segments.sample_lengths == batch.rows().lengths == tuple(lengths)
    assert batch.flat("patches").lengths == tuple(batch.flat("patches").starts.diff().tolist())


@settings(deadline=None, max_examples=60)
@given(st.data(), ragged(), st.sampled_from(["left", "right"]))
def test_taking_apart_gives_back_every_sample(data, samples, side):
    rows = data.draw(placed([len(s["ids"]) for s in samples]))
    batch = collate(samples, rows, fields_with(0, 0, "keep"), side=side)

    def back(name: str, axis: str) -> list:
        return [t.tolist() for t in batch.per_sample(batch[name], axis)]

    assert back("ids", "cells") == back("labels", "cells") == [s["ids"] for s in samples]
    assert back("patches", "patches") == [s["patches"] for s in samples]
    assert back("label", "samples") == [s["label"] for s in samples]
    assert back("minute", "sets") == [s["minute"] for s in samples]
    assert back("events", "events") == joined([s["events"] for s in samples])
    cells = batch.rows()
    tokens = cells.take_tokens(batch["ids"])
    assert torch.equal(cells.put_tokens(tokens, pad=0), batch["ids"])


@settings(deadline=None, max_examples=40)
@given(st.data(), ragged())
def test_what_a_sample_becomes_does_not_depend_on_its_neighbours(data, samples):
    rows = data.draw(placed([len(s["ids"]) for s in samples]))
    batch = collate(samples, rows, fields_with(1, 0, "keep"))
    for at, sample in enumerate(samples):
        alone = collate([sample], padded_rows(rows.ids[at : at + 1], len(sample["ids"])), fields_with(1, 0, "keep"))
        for name in ("ids", "labels"):
            assert batch.per_sample(batch[name])[at].tolist() == alone[name][0].tolist()


def test_no_samples_make_an_empty_micro_batch_in_either_layout():
    for rows in (padded_rows(np.array([], dtype=np.int64), 5), packed_row(np.array([], dtype=np.int64), 0)):
        batch = collate([], rows, fields_with(1, 0, "float64"))
        assert batch.num_samples == 0
        assert batch["ids"].shape == (0, rows.width)
        assert batch["ids"].dtype == torch.float64
        assert batch["label"].shape == (0,)
        assert batch.per_sample(batch["ids"]) == []


def test_a_table_of_fixed_slots_has_the_same_shape_for_any_samples():
    tables = []
    for lengths in ([3, 2], [1, 1, 1, 4]):
        samples = [{"ids": [1] * n} for n in lengths]
        tables.append(collate(samples, packed_row(np.arange(len(samples)), 16), (ALONG,), slots=8).segments.starts)
    assert tables[0].shape == tables[1].shape == (9,)


def test_rows_are_as_wide_as_a_field_asks_for_and_hold_the_same():
    wide = Field(name="ids", pad=-7, least_cells=6)
    samples = [{"ids": [1, 2]}, {"ids": [3]}]
    for side in ("left", "right"):
        batch, plain = (collate(samples, padded_rows(np.array([0, 1]), 2), (f,), side=side) for f in (wide, ALONG))
        assert batch["ids"].shape == (2, 6)
        assert [x.tolist() for x in batch.per_sample(batch["ids"])] == [
            x.tolist() for x in plain.per_sample(plain["ids"])
        ]
        assert batch.is_real.sum() == 3
    assert collate(samples, packed_row(np.array([0, 1]), 3), (wide,))["ids"].shape == (1, 3)


def test_read_only_and_foreign_arrays_are_read_without_being_changed():
    frozen = np.arange(4)
    frozen.flags.writeable = False
    for value in (frozen, np.arange(4)[::-1], np.arange(4, dtype=">i4"), np.arange(4, dtype=np.uint16)):
        batch = collate([{"ids": value}], padded_rows(np.array([0]), 5), (ALONG,))
        assert batch["ids"].tolist() == [[*value.tolist(), -7]]
        batch["ids"].zero_()
        assert value.sum() == 6


BAD = {
    "missing, with a near name": (
        {"idz": [1]},
        "sample 40 has no field 'ids'\n.*fields \\['idz'\\]\n.*did you mean 'idz'",
    ),
    "missing": ({"text": [1]}, "sample 40 has no field 'ids'\n.*fields \\['text'\\]\n.*return every declared field"),
    "ragged inside": ({"ids": [[1], [2, 3]]}, "'ids' of sample 40 is not an array of numbers\n.*\n.*kind='nested'"),
    "a string": ({"ids": "hello"}, "'ids' of sample 40 is not an array of numbers\n  seen: 'hello'"),
    "strings": ({"ids": ["a", "b"]}, "'ids' of sample 40 is not an array of numbers\n  seen: \\['a', 'b'\\]"),
    "nothing": ({"ids": None}, "'ids' of sample 40 is not an array of numbers\n  seen: None"),
    "a huge number": ({"ids": [2**70]}, "'ids' of sample 40 is not an array of numbers\n  seen: \\[118059"),
    "an unsigned number that is too large": ({"ids": [2**63]}, "'ids' of sample 40 is not an array of numbers"),
    "a complex number": ({"ids": [1j]}, "'ids' of sample 40 is not an array of numbers"),
    "a single value": ({"ids": 3}, "'ids' of sample 40 has no length\n.*single value 3, declared kind='along'"),
    "too long": ({"ids": [1] * 9}, "sample 40 is longer than its row\n.*9 tokens, but the planned rows have 8 cells"),
    "another width": (
        {"ids": [[1, 2]]},
        "'ids' has different shapes.*\n  seen: \\(\\) in sample 7 and \\(2,\\) in sample 40 after the first axis",
    ),
    "another dtype": (
        {"ids": [0.5]},
        "'ids' has different dtypes.*\n  seen: float32 in sample 40 and int64 in sample 7",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_sample_that_contradicts_its_declaration_is_named(case):
    sample, message = BAD[case]
    with pytest.raises(BatchError, match=message):
        collate([{"ids": [1, 2]}, sample], padded_rows(np.array([7, 40]), 8), (ALONG,))


def test_packed_samples_that_do_not_fit_their_row_are_named():
    samples = [{"ids": [1] * n} for n in (2, 3, 4)]
    with pytest.raises(
        BatchError, match=r"packed row 1 .*\n.*samples \[1, 2\] have 7 tokens together, the row 5 cells"
    ):
        collate(samples, rows_of([[0], [1, 2]], 5), (ALONG,))


def test_fields_of_one_axis_must_agree_sample_by_sample():
    fields = (ALONG, Field(name="kinds"))
    samples = [{"ids": [1, 2], "kinds": [1, 1]}, {"ids": [1, 2, 3], "kinds": [1]}]
    with pytest.raises(BatchError, match="along 'cells' have different lengths in sample 8\n  seen: ids: 3, kinds: 1"):
        collate(samples, padded_rows(np.array([7, 8]), 4), fields)


def test_a_set_that_disagrees_is_named_by_the_sample_that_holds_it():
    fields = [Field(name=n, kind="nested", axis="sets", inner="events") for n in ("kind", "value")]
    samples = [{"kind": [], "value": []}, {"kind": [[1], [2, 3]], "value": [[1], [2]]}]
    with pytest.raises(
        BatchError, match="along 'events' have different lengths in sample 5\n  seen: kind: 2, value: 1"
    ):
        collate(samples, padded_rows(np.array([4, 5]), 2), fields)


def test_a_set_without_entries_and_a_flat_value_for_a_nested_field_are_refused():
    fields = (Field(name="events", kind="nested", axis="sets", inner="events"),)
    rows = padded_rows(np.array([6]), 2)
    with pytest.raises(BatchError, match="'events' of sample 6 has an empty set\n  seen: set 1 of 2"):
        collate([{"events": [[1], []]}], rows, fields)
    for flat in ({"a": 1}, "text", 5):
        with pytest.raises(BatchError, match=f"'events' of sample 6 is not nested\n  seen: {type(flat).__name__}"):
            collate([{"events": flat}], rows, fields)
    with pytest.raises(BatchError, match="'events' of sample 6 has no length"):
        collate([{"events": [1, 2]}], rows, fields)


def test_once_values_of_different_shapes_are_refused():
    fields = (ALONG, Field(name="box", kind="once"))
    samples = [{"ids": [1], "box": [1, 2]}, {"ids": [1], "box": [1, 2, 3]}]
    with pytest.raises(
        BatchError, match=r"'box' has different shapes.*\n  seen: \(2,\) in sample 0 and \(3,\) in sample 1\n"
    ):
        collate(samples, padded_rows(np.array([0, 1]), 1), fields)


def test_the_number_of_samples_and_the_fields_are_checked_first():
    with pytest.raises(BatchError, match="2 samples, rows for 1"):
        collate([{"ids": [1]}] * 2, padded_rows(np.array([0]), 1), (ALONG,))
    with pytest.raises(ConfigError, match="no fields at all"):
        collate([], padded_rows(np.array([]), 1), ())


LABELS = Field(name="labels", pad=-100, blank=-100)


def labelled(*fields: Field) -> MicroBatch:
    return collate([{"labels": [3, -100]}, {"labels": [2]}], padded_rows(np.arange(2), 2), fields or (LABELS,))


def test_where_a_field_is_filled_moves_with_its_micro_batch():
    batch = labelled(LABELS, Field(name="ids", source="labels"))
    assert batch.filled_cells("labels").tolist() == [0, 2]
    assert batch.filled_cells("labels", blank=-100).tolist() == [0, 2]
    assert batch.filled_cells("labels", blank=0) is None
    assert batch.filled_cells("ids") is None
    assert batch.filled_cells("others") is None
    moved = batch.to("meta")
    assert moved.filled_cells("labels").device.type == "meta"
    assert moved.to("meta").filled_cells("labels").shape == (2,)
    host = labelled(replace(LABELS, host=True)).to("meta")
    assert host.filled_cells("labels").tolist() == [0, 2]


def in_place(batch):
    batch["labels"][0, 1] = 4


def through_data(batch):
    batch["labels"].data[0, 1] = 4


def through_numpy(batch):
    batch["labels"].numpy()[0, 1] = 4


@pytest.mark.parametrize("change", [in_place, through_data, through_numpy])
def test_on_the_host_no_change_goes_unnoticed(change):
    for then in (lambda b: b, lambda b: pickle.loads(pickle.dumps(b)), copy.deepcopy, handed_over):
        batch = labelled()
        change(batch)
        assert then(batch).filled_cells("labels").tolist() == [0, 1, 2]
        assert then(batch).to("meta").filled_cells("labels").shape == (3,)
        batch = then(labelled())
        change(batch)
        assert batch.filled_cells("labels").tolist() == [0, 1, 2]


def handed_over(batch):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        send_object(one, batch)
        return receive_object(other, wait=True)


def test_a_field_that_was_changed_on_a_device_is_not_relied_upon():
    batch = labelled()
    other = replace(batch, fields={"labels": torch.tensor([[-100, 5], [6, -100]])})
    assert other.filled_cells("labels").tolist() == [1, 2]
    moved = batch.to("meta")
    assert replace(moved, fields={"labels": torch.empty(2, 2, device="meta")}).filled_cells("labels") is None
    moved["labels"].fill_(-100)
    assert moved.filled_cells("labels") is None
    assert not moved.to("meta").filled


def test_what_was_made_in_inference_mode_is_known_on_the_host_only():
    with torch.inference_mode():
        batch = labelled()
        assert batch.filled_cells("labels").tolist() == [0, 2]
        assert batch.to("meta").filled_cells("labels") is None


def test_a_micro_batch_moves_without_a_field_that_was_taken_out():
    assert replace(labelled(), fields={}).to("meta").filled_cells("labels") is None


def test_a_field_of_vectors_has_no_blank_entries():
    fields = (Field(name="x", pad=0, blank=0),)
    with pytest.raises(BatchError, match=r"'x' declares `blank`.*\n  seen: entries of shape \(2,\)"):
        collate([{"x": [[0.0, 1.0]]}], padded_rows(np.arange(1), 1), fields)


def test_a_host_field_stays_where_it_is_when_its_micro_batch_moves():
    fields = (Field(name="sizes", host=True), Field(name="ids", source="sizes"))
    batch = collate([{"sizes": [3, 1]}, {"sizes": [2]}], padded_rows(np.arange(2), 2), fields)
    moved = batch.to("meta")
    assert moved["sizes"].tolist() == [[3, 1], [2, 0]]
    assert moved["ids"].device.type == "meta"


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_sample_that_fills_its_row_lies_there_as_any_other_would(side, length):
    rows = padded_rows(np.array([5]), length)
    axis = _row_axis(np.array([length]), rows, side, None, is_planned=True)
    wanted = _rows_axis(np.array([length]), rows, side, None, is_planned=True)
    for name in ("segment_ids", "positions", "cell_of_token"):
        found, expected = getattr(axis, name), getattr(wanted, name)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (axis.lengths, axis.row_starts) == (wanted.lengths, wanted.row_starts)
    for name in ("starts", "is_real"):
        found, expected = getattr(axis.segments, name), getattr(wanted.segments, name)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for name in ("lengths", "is_sample", "max_length", "layout", "side", "shape"):
        assert getattr(axis.segments, name) == getattr(wanted.segments, name), name


def test_a_row_wider_than_its_only_sample_keeps_its_padding():
    batch = collate([{"ids": [1, 2]}], padded_rows(np.array([0]), 5), [Field(name="ids", pad=9)])
    assert batch["ids"].tolist() == [[1, 2, 9, 9, 9]]
    assert batch.is_real.sum() == 2
