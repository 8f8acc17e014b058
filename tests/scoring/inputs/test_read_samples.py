"""Every line of the data becomes a sample or a record that says why not; nothing stops the others."""

from __future__ import annotations

import json

import pytest

from truebatch.errors import DataError
from truebatch.scoring.backends.interface import ScoreRequest
from truebatch.scoring.inputs.read_samples import Broken, read_requests
from truebatch.scoring.store.input_index import list_samples

GOOD = b'{"user": "ok"}'
POISON = {
    b'{"user": "cut': "invalid_json",
    b"": None,
    b"not json": "invalid_json",
    b'{"user": NaN}': "invalid_json",
    b'{"user": "\\ud800"}': "not_text",
    b'{"user": "a\\u0000b"}': "not_text",
    b'{"user": "a\x00b"}': "invalid_json",
    '{"user": "中文"}'.encode("gbk"): "not_text",
    b'"just a text"': "",
    b"5": "wrong_type",
    b"null": "wrong_type",
    b"[]": "wrong_type",
    b"{}": "no_prompt",
    b'{"usr": "x"}': "no_prompt",
    b'{"user": ""}': "no_prompt",
    b'{"user": 7}': "wrong_type",
    b'{"user": "x", "system": 3}': "wrong_type",
    b'{"user": "x", "options": 3}': "wrong_type",
    b'{"user": "x", "images": [5]}': "wrong_type",
    b'{"messages": [{"role": "user"}]}': "wrong_type",
    b'{"messages": [{"role": "user", "content": 5}]}': "wrong_type",
    b'{"messages": "hello"}': "wrong_type",
    b"[" * 3000: "invalid_json",
    b'{"user": "' + b"x" * 200_000 + b'"}': "",
    '{"user": "\\\\u0000 中文"}'.encode(): "",
}
"""A line -> the kind of its record; "" where it is a sample, None where it is nothing."""


def test_every_broken_line_is_a_record_and_every_other_one_a_sample(tmp_path):
    lines = [b"\xef\xbb\xbf" + GOOD]
    for line in POISON:
        lines += [line, GOOD]
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    found = list(read_requests(file))
    expected = [""]
    for kind in POISON.values():
        expected += [] if kind is None else [kind]
        expected.append("")
    assert [one.kind if isinstance(one, Broken) else "" for one in found] == expected
    assert [one.id for one in found] == [str(n) for n in range(len(found))]


def test_a_line_that_is_too_long_is_one_record_and_not_several(tmp_path, monkeypatch):
    monkeypatch.setattr("truebatch.io.text_encoding.bounded_lines.__kwdefaults__", {"most": 40})
    file = tmp_path / "data.jsonl"
    file.write_bytes(GOOD + b'\n{"user": "' + 200 * b"a" + b'"}\n' + GOOD + b"\n")
    found = list(read_requests(file))
    assert [one.kind if isinstance(one, Broken) else "" for one in found] == ["", "too_long", ""]
    assert f"{file}:2 has more than" in found[1].message
    table = tmp_path / "data.csv"
    table.write_bytes(b"id,user\na," + 200 * b"b" + b"\n")
    with pytest.raises(DataError, match=r"data\.csv:2 is too long"):
        list(read_requests(table))


def test_a_csv_row_with_other_cells_is_a_record(tmp_path):
    file = tmp_path / "data.csv"
    file.write_bytes(b'id,user,note\na,"hello, you",x\nb,one\nc,"two\nlines",\nd,\xff,z\n')
    found = list(read_requests(file))
    assert [type(one).__name__ for one in found] == ["ScoreRequest", "Broken", "ScoreRequest", "Broken"]
    assert (found[0].user, found[0].meta, found[2].user) == ("hello, you", {"note": "x"}, "two\nlines")


def test_parquet_holds_the_same_samples(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"id": ["a", "b"], "user": ["hello", None], "image": [{"bytes": b"xy", "path": None}, None]}
    parquet.write_table(arrow.table(rows), tmp_path / "data.parquet")
    first, second = read_requests(tmp_path / "data.parquet")
    assert (first.id, first.user, first.images) == ("a", "hello", (b"xy",))
    assert isinstance(second, Broken)
    assert (second.id, second.kind) == ("b", "no_prompt")


def test_a_file_in_utf16_is_refused_as_a_whole(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"user": "x"}\n', encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16"):
        list(read_requests(file))


def test_images_inside_messages_are_found_beside_the_data(tmp_path):
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"id": "s", "messages": [{"role": "user", "content": parts}]}) + "\n")
    (asked,) = read_requests(file)
    assert isinstance(asked, ScoreRequest)
    assert asked.images == (str(tmp_path / "a.png"),)
    assert asked.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "what?"}]
    (listed,) = list_samples(file)
    assert listed.failure is not None
    assert (listed.failure.stage, listed.failure.kind) == ("decode", "unreadable_image")


def test_python_values_and_ready_samples_are_read_too():
    ready = ScoreRequest(id="z", user="q")
    chat = [{"role": "user", "content": "hi"}]
    found = list(read_requests(["plain", chat, {"prompt": "p", "id": 7}, ready, 3.5]))
    assert [one.id for one in found] == ["0", "1", "7", "z", "4"]
    assert found[3] is ready
    assert isinstance(found[4], Broken)


def test_equal_content_has_one_key_and_another_place_none_of_its_own():
    first, second, other = list_samples([{"user": "a", "id": 1}, {"user": "a", "id": 2, "note": "n"}, {"user": "b"}])
    assert first.key == second.key != other.key
