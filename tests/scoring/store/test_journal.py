"""A journal keeps what was committed, whole, and tells what was begun by a worker that is gone."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from truebatch.errors import DataError, RunError
from truebatch.scoring.store.content_key import sample_key
from truebatch.scoring.store.journal import open_journal, read_journals
from truebatch.scoring.store.manifest import read_manifest, settle_manifest
from truebatch.scoring.store.outcome import Outcome, failed

ROOT = Path(__file__).parents[3]


def ok(key, score=1.0, **more):
    return Outcome(key=key, status="ok", score=score, **more)


def test_what_was_committed_comes_back(tmp_path):
    outcomes = [ok("a", 0.1, output={"text": "好\ud800", "mass": 0.5}, tokens=7), ok("b", None)]
    bad = failed("c", stage="decode", kind="truncated_image", message="cut \ud800 off")
    with open_journal(tmp_path) as journal:
        journal.commit(journal.begin(0, ["a", "b", "c"]), [*outcomes, bad], seconds=0.5)
    told = read_journals(tmp_path)
    assert told.results == {"a": outcomes[0], "b": outcomes[1], "c": bad}
    assert (told.batches, told.seconds, told.suspects, told.disagreements) == (1, 0.5, (), ())


def test_the_first_success_wins_and_a_later_different_one_is_reported(tmp_path):
    for worker, score in (("0", 1.0), ("1", 1.0), ("2", 2.0)):
        with open_journal(tmp_path, worker=worker) as journal:
            journal.commit(journal.begin(0, ["a"]), [ok("a", score)], seconds=0.0)
    told = read_journals(tmp_path)
    assert told.results["a"].score == 1.0
    assert told.disagreements == ("a",)


def test_a_success_replaces_a_failure_and_the_last_failure_stands(tmp_path):
    with open_journal(tmp_path) as journal:
        for attempt in (1, 2):
            again = failed("a", stage="model", kind="raised", message="x", attempts=attempt)
            journal.commit(journal.begin(0, ["a"], attempt=attempt), [again], seconds=0.0)
        assert read_journals(tmp_path).results["a"].attempts == 2
        journal.commit(journal.begin(0, ["a"], attempt=3), [ok("a")], seconds=0.0)
    assert read_journals(tmp_path).results["a"].status == "ok"


def test_a_batch_of_a_living_worker_is_no_suspect_and_that_of_a_killed_one_is(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.begin(3, ["a", "b"])
        assert read_journals(tmp_path).suspects == ()
    script = (
        "import os, signal, sys; from pathlib import Path; from truebatch.scoring.store.journal import open_journal\n"
        "with open_journal(Path(sys.argv[1]), worker='1') as journal:\n"
        "    journal.begin(4, ['c', 'd'], attempt=2); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    (suspect,) = read_journals(tmp_path).suspects
    assert (suspect.number, suspect.attempt, suspect.keys) == (4, 2, ("c", "d"))


@pytest.mark.parametrize("point", ["journal.before_commit", "journal.in_commit", "journal.committed"])
def test_a_kill_around_a_commit_leaves_all_of_a_batch_or_nothing(tmp_path, point):
    script = (
        "import sys; from pathlib import Path; from truebatch.scoring.store.journal import open_journal\n"
        "from truebatch.scoring.store.outcome import Outcome\n"
        "one = lambda key: Outcome(key=key, status='ok', score=1.0)\n"
        "with open_journal(Path(sys.argv[1])) as journal:\n"
        "    journal.commit(journal.begin(0, ['a', 'b']), [one('a'), one('b')], seconds=0.0)\n"
        "    journal.commit(journal.begin(1, ['c', 'd']), [one('c'), one('d')], seconds=0.0)\n"
    )
    environment = {**os.environ, "TRUEBATCH_FAILPOINT": f"{point}:kill:2"}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, env=environment)
    assert done.returncode == -signal.SIGKILL
    told = read_journals(tmp_path)
    assert set(told.results) == ({"a", "b", "c", "d"} if point == "journal.committed" else {"a", "b"})
    assert len(told.suspects) == (0 if point == "journal.committed" else 1)


def test_a_full_disk_keeps_what_was_committed_and_says_so(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.commit(journal.begin(0, ["a"]), [ok("a")], seconds=0.0)
        journal._connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(RunError, match="what was committed stays"):
            journal.commit(journal.begin(1, ["b"]), [ok("b", output={"text": "x" * 200_000})], seconds=0.0)
    assert set(read_journals(tmp_path).results) == {"a"}


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "worker-0-x.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(RunError, match=r"worker-0-x\.db cannot be read"):
        read_journals(tmp_path)


def test_a_file_cut_off_at_its_birth_is_an_empty_journal(tmp_path):
    (tmp_path / "journal").mkdir()
    sqlite3.connect(tmp_path / "journal" / "worker-0-x.db").close()
    assert read_journals(tmp_path).results == {}


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_cannot_be_recorded(score):
    with pytest.raises(DataError, match="finite"):
        ok("a", score)


def test_a_failure_with_a_score_cannot_be_recorded():
    with pytest.raises(DataError, match="has a stage and a kind"):
        Outcome(key="a", status="failed", stage="parse", kind="unparsable", score=5.0)


def test_a_key_is_of_content_and_not_of_place_or_order_of_names(tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"pixels")
    same = tmp_path / "b.png"
    same.write_bytes(b"pixels")
    key = sample_key({"system": "s", "user": "u"}, [picture])
    assert (
        key == sample_key({"user": "u", "system": "s"}, [same]) == sample_key({"system": "s", "user": "u"}, [b"pixels"])
    )
    others = [({"system": "s", "user": "v"}, [picture]), ({"system": "s", "user": "u"}, []), ({"user": "u"}, [picture])]
    assert len({key, *(sample_key(*other) for other in others)}) == 4


def test_another_configuration_is_refused_by_the_names_of_all_that_differs(tmp_path):
    first = settle_manifest(tmp_path, {"model": "m", "processor": {"max_pixels": 5}})
    assert settle_manifest(tmp_path, {"model": "m", "processor": {"max_pixels": 5}}) == first == read_manifest(tmp_path)
    with pytest.raises(RunError) as refused:
        settle_manifest(tmp_path, {"model": "n", "processor": {"max_pixels": 6}})
    assert "model: was 'm', now 'n'" in refused.value.seen
    assert "processor.max_pixels: was 5, now 6" in refused.value.seen
