"""A record that was edited after it was written is no result: it is named, and judged again."""

from __future__ import annotations

import json
import shutil
import sqlite3

import pytest

from truebatch.cli.app import run
from truebatch.scoring.store.export import export, read_rows, read_status
from truebatch.scoring.store.journal import open_journal, read_journals
from truebatch.scoring.store.outcome import Outcome, failed


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A run of twelve samples, one of which failed; never changed."""
    folder = tmp_path_factory.mktemp("scored")
    data = [{"id": f"s{n}", "user": "word " * (n + 1)} for n in range(11)]
    data.append({"id": "bad", "user": "bad", "options": {"fail": "raise"}})
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in data))
    assert run(command(folder)) == 3
    export(folder / "run", folder / "whole.jsonl")
    return folder


def command(folder, name="run"):
    return ["score", str(folder / "data.jsonl"), "--model", "scripted", "--yesno", "--out", str(folder / name)]


@pytest.fixture
def folder(scored, tmp_path):
    shutil.copytree(scored, tmp_path / "copy")
    return tmp_path / "copy"


def edit(folder, *statements):
    for path in (folder / "run" / "journal").glob("worker-*.db"):
        with sqlite3.connect(path) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()


EDITS = [
    "score = coalesce(score, 0) + 1",
    "score = CASE WHEN score IS NULL THEN 3 ELSE NULL END",
    "score = 'high'",
    "status = 'ok', score = 9, stage = '', kind = '', message = ''",
    "status = 'great'",
    "output = '{'",
    "output = json_set(output, '$.said', 'other')",
    "tokens = tokens + 1",
    "attempts = 7",
    "kind = kind || 'x', stage = stage || 'x'",
    "message = message || ' '",
    "key = substr(key, 1, 31) || 'g'",
    "batch = batch + 100",
    "checksum = ''",
    "checksum = substr(checksum, 1, 15) || 'x'",
]


@pytest.mark.parametrize("values", EDITS)
def test_an_edited_record_is_named_is_no_result_and_is_judged_again(folder, values, capsys):
    edit(folder, f"UPDATE results SET {values}")
    told = read_status(folder / "run")
    assert (told.ok, told.failed, told.pending) == (0, 0, 12)
    assert all(row["score"] is None and row["status"] == "pending" for row in read_rows(folder / "run"))
    if "key" not in values:
        assert len(told.damaged) == 12
        assert run(["run", "status", str(folder / "run")]) == 1
        assert "    s0 (worker-0-" in capsys.readouterr().out
        assert run(["run", "export", str(folder / "run"), "--to", str(folder / "now.csv")]) == 1
        assert "bad (worker-0-" in capsys.readouterr().err
        assert "is not what was written" in (folder / "now.csv").read_text()
    assert run(command(folder)) == 3
    export(folder / "run", folder / "again.jsonl")
    assert (folder / "again.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert run(["run", "status", str(folder / "run")]) == 3


def test_one_edited_score_among_others_is_named_and_the_others_stand(folder, capsys):
    key = read_journals(folder / "run").results
    lost = next(name for name in key if key[name].score == 5.0)
    edit(folder, f"UPDATE results SET score = 99.0 WHERE key = '{lost}'")
    assert run(["report", str(folder / "run"), "--out", str(folder / "page.html")]) == 0
    page = (folder / "page.html").read_text()
    assert "Damaged records" in page
    assert "s0 (worker-0-" in page
    told = read_status(folder / "run")
    assert (told.ok, told.failed, told.pending) == (10, 1, 1)


def test_two_records_that_changed_places_are_both_seen(folder):
    edit(
        folder,
        "CREATE TABLE other AS SELECT * FROM results WHERE score IN (5.0, 10.0)",
        "UPDATE results SET score = 15.0 - score WHERE score IN (5.0, 10.0)",
    )
    assert len(read_status(folder / "run").damaged) == 2


def test_a_journal_of_an_earlier_version_opens_and_says_that_it_was_not_checked(folder, capsys):
    edit(folder, "ALTER TABLE results DROP COLUMN checksum")
    assert run(["run", "status", str(folder / "run")]) == 3
    assert "12 records of an earlier version have no checksum" in capsys.readouterr().out
    export(folder / "run", folder / "now.jsonl")
    assert (folder / "now.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert run(command(folder)) == 3


def test_a_later_good_record_stands_beside_a_damaged_one(tmp_path):
    bad = failed("a", stage="model", kind="raised", message="x")
    with open_journal(tmp_path) as journal:
        journal.commit(journal.begin(0, ["a"]), [bad], seconds=0.0)
        journal.commit(journal.begin(0, ["a"], attempt=2), [Outcome(key="a", status="ok", score=1.0)], seconds=0.0)
        journal._connection.execute("UPDATE results SET score = 2.0 WHERE status = 'ok'")
        journal._connection.commit()
        told = read_journals(tmp_path)
        assert (dict(told.results), list(told.damaged)) == ({}, ["a"])
        journal.commit(journal.begin(0, ["a"], attempt=3), [Outcome(key="a", status="ok", score=1.0)], seconds=0.0)
        told = read_journals(tmp_path)
    assert (told.results["a"].score, dict(told.damaged)) == (1.0, {})


@pytest.mark.parametrize("score", [0, 5, -0.0, 0.1, 1e300, 5e-324, None])
def test_any_value_that_is_written_is_what_is_read(tmp_path, score):
    output = {"text": "好\ud800\x00\n'\"", "deep": [1.5, {"a": None}]}
    bad = failed("c", stage="decode", kind="k\ud800"[:1], message="cut \ud800 off \x00 \x1b[31m 好")
    with open_journal(tmp_path) as journal:
        outcomes = [Outcome(key="a", status="ok", score=score, output=output, tokens=7), bad]
        journal.commit(journal.begin(0, ["a", "c"]), outcomes, seconds=0.5)
    told = read_journals(tmp_path)
    assert told.results == {"a": outcomes[0], "c": bad}
    assert not told.damaged


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:1], lines[1].replace("s0", "s1"), lines[2].replace("s1", "s0"), *lines[3:]],
        lambda lines: lines[:-1],
        lambda lines: [*lines[:1], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines, lines[-1]],
    ],
)
def test_a_list_of_samples_that_was_edited_is_refused_and_written_anew(folder, change, capsys):
    path = folder / "run" / "input.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    assert run(["run", "export", str(folder / "run"), "--to", str(folder / "now.jsonl")]) == 2
    assert "its checksum does not belong to its lines" in capsys.readouterr().err
    assert run(command(folder)) == 3
    export(folder / "run", folder / "now.jsonl")
    assert (folder / "now.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


def test_a_list_of_an_earlier_version_opens(folder):
    path = folder / "run" / "input.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    export(folder / "run", folder / "now.jsonl")
    assert (folder / "now.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
