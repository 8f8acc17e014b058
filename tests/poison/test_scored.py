"""Poison samples through scoring: a record of their own with a reason, and every other score as it would be without them."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.scorer import Scorer

GOOD = [{"id": f"g{i}", "user": "x" * (3 + i)} for i in range(4)]
SCORES = {f"g{i}": float(3 + i) for i in range(4)}


def picture(mode="RGB", size=(8, 8), kind="PNG", **more):
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **more)
    return file.getvalue()


def animated():
    file = io.BytesIO()
    frames = [Image.new("P", (8, 8), n) for n in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


LINES = {
    "not JSON": "{",
    "cut off": '{"user": "a',
    "a list": "[1, 2]",
    "a number": "7",
    "null": "null",
    "no prompt": '{"id": "p"}',
    "an empty prompt": '{"id": "p", "user": ""}',
    "a prompt that is a list": '{"id": "p", "user": [1]}',
    "half a character": '{"id": "p", "user": "\\ud83d"}',
    "NUL": '{"id": "p", "user": "a\\u0000"}',
    "NaN": '{"id": "p", "user": NaN}',
    "messages that are text": '{"id": "p", "messages": "hi"}',
    "messages without a role": '{"id": "p", "messages": [{"content": "x"}]}',
    "options that are a list": '{"id": "p", "user": "a", "options": [1]}',
    "an image that is a number": '{"id": "p", "user": "a", "image": 7}',
    "an image that is missing": '{"id": "p", "user": "a", "image": "nowhere.png"}',
    "too long": json.dumps({"id": "p", "user": "y" * 100_001}),
    "a model that raises": '{"id": "p", "user": "a", "options": {"fail": "raise"}}',
    "a score that is NaN": '{"id": "p", "user": "a", "options": {"fail": "nan"}}',
    "out of memory alone": '{"id": "p", "user": "a", "options": {"fail": "memory"}}',
}
PICTURES = {
    "no bytes": b"", "a text": b"hello", "cut off": picture(size=(64, 64), kind="JPEG")[:-90],
    "a bomb": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x01\x86\xa0\x00\x01\x86\xa0\x08\x02\x00\x00\x00",
}  # fmt: skip
FINE = {
    "CMYK": picture("CMYK", kind="JPEG"), "16 bits": picture("I;16"), "one bit": picture("1"), "alpha": picture("RGBA"),
    "a palette": picture("P"), "1 x 1": picture(size=(1, 1)), "very wide": picture(size=(5000, 1)), "animated": animated(),
    "grey with alpha": picture("LA"), "turned by EXIF": picture(kind="JPEG", exif=turned()),
}  # fmt: skip
ODD = {
    "an id twice": {"id": "g0", "user": "zz"},
    "an id that is a number": {"id": 7, "user": "zz"},
    "more fields": {"id": "p", "user": "zz", "colour": ["red"], "deep": {"a": [None]}},
    "markup and formats": {"id": "[red]{0.__class__}%s<script>", "user": "zz"},
    "control characters": {"id": "p\x1b[2J", "user": "zz"},
    "white space": {"id": "p", "user": "  "},
}


def scored(samples, folder):
    run = Scorer([ScriptedBackend()], limits=Limits(cells=64)).score(samples, folder / "run", check=False)
    return list(run.rows())


def check_others(rows, *, at):
    others = {row["id"]: row["score"] for row in rows if row["index"] != at}
    assert others == SCORES


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LINES)
def test_a_poison_line_is_a_record_with_a_reason_and_changes_no_other(name, tmp_path):
    lines = [json.dumps(one) for one in GOOD]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([*lines[:2], LINES[name], *lines[2:]]) + "\n")
    rows = scored(path, tmp_path)
    check_others(rows, at=2)
    assert rows[2]["status"] == "failed"
    assert rows[2]["score"] is None
    assert rows[2]["stage"]
    assert rows[2]["kind"]
    assert rows[2]["message"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*PICTURES, *FINE])
def test_a_poison_picture_is_a_record_and_an_odd_one_is_judged(name, tmp_path):
    data = PICTURES.get(name, FINE.get(name))
    rows = scored([*GOOD[:2], {"id": "p", "user": "zz", "image": data}, *GOOD[2:]], tmp_path)
    check_others(rows, at=2)
    assert (rows[2]["status"], rows[2]["score"]) == (("failed", None) if name in PICTURES else ("ok", 2.0))


@pytest.mark.parametrize("name", ODD)
def test_an_odd_sample_gets_its_own_score(name, tmp_path):
    rows = scored([*GOOD[:2], ODD[name], *GOOD[2:]], tmp_path)
    check_others(rows, at=2)
    assert rows[2]["status"] == "ok"
    assert rows[2]["score"] == 2.0


def test_values_of_other_kinds_are_records_too(tmp_path):
    rows = scored([*GOOD, np.array([1]), object(), b"bytes", 3.5], tmp_path)
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["failed"] * 4
    assert {row["id"]: row["score"] for row in rows[:4]} == SCORES


def test_there_are_forty_kinds_and_more():
    assert len({*LINES, *PICTURES, *FINE, *ODD}) >= 38
