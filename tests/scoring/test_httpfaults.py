"""Servers that fail: every sample has a record, no score is one that nobody gave, and nothing hangs, grows or is lost."""

from __future__ import annotations

import json

import pytest

from tests.scoring.faultserver import FAULTS, FaultServer, score
from truebatch.cli import run

KEY = "sk-planted-0123456789-zxqv"
GOOD = [f"good {number}" for number in range(1, 61)]


def write_samples(path, texts):
    path.write_text("".join(json.dumps({"id": text, "user": text}) + "\n" for text in texts))
    return path


def spread(faults, good):
    """Faults among good samples."""
    step = max(1, len(good) // max(1, len(faults)))
    return [text for at, fault in enumerate(faults) for text in (fault, *good[at * step : (at + 1) * step])] + good[
        len(faults) * step :
    ]


def rows_of(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


LATE = [name for name, (_, kind) in FAULTS.items() if kind == "timeout"]
FLOOD = "a flood of beginnings"
"""Keeps a core busy until its deadline: left to the sweep."""


def score_faults(folder, texts, *options):
    """The exit code, the rows by sample and the server of a run over these samples."""
    data = write_samples(folder / "d.jsonl", texts)
    with FaultServer() as server:
        given = ["--model", server.address, "--served", "m", "--yesno", *options]
        code = run(["score", str(data), *given, "--out", str(folder / "r"), "--export", str(folder / "o.jsonl")])
    return code, rows_of(folder / "o.jsonl"), server


def check_rows(rows, texts):
    """A record for each: of the kind of its fault, or with the score that was given for this sample."""
    assert list(rows) == texts
    wanted = {text: FAULTS.get(text, (None, ""))[1] for text in texts}
    assert {name: row["kind"] or "" for name, row in rows.items()} == wanted
    for name, row in rows.items():
        assert row["score"] is None if wanted[name] else row["score"] == pytest.approx(score(name))


def test_a_sample_of_every_fault_has_a_record_and_all_others_their_own_score(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    texts = spread([name for name in FAULTS if name not in LATE], GOOD)
    code, rows, server = score_faults(tmp_path, texts, "--timeout", "60", "--tries", "2")
    told = "".join(capfd.readouterr())
    assert code == 3, told
    check_rows(rows, texts)
    assert server.elsewhere == 0  # no redirect was followed
    for name in ("status 400", "deep", "sent on with 302", "a gzip bomb"):
        assert server.requests[name] == 1, name
    for name in ("status 503", "reset at once", "too many", "a chunk cut off"):
        assert server.requests[name] == 2, name
    assert server.authorization == f"Bearer {KEY}"
    assert KEY not in told
    assert [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []


def test_what_does_not_end_ends_at_the_deadline(tmp_path):
    """A byte at a time, in the status, the headers or the body: no pause between two of them is ever long."""
    texts = [name for name in LATE if name != FLOOD] + GOOD[:2]
    code, rows, server = score_faults(tmp_path, texts, "--timeout", "2")
    assert code == 3
    check_rows(rows, texts)
    assert max(server.requests.values()) == 1  # what was late once is not asked for again
    assert max(server.seconds.values()) < 60
