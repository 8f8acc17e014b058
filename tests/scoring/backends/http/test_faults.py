"""Servers that fail: every sample has a record, no score is one that nobody gave, and nothing hangs, grows or is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.scoring.backends.http.fault_server import FAULTS, FaultServer, http, score, value
from truebatch.cli.app import run
from truebatch.scoring.store.export import read_rows

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
    wanted = {text: FAULTS.get(text.partition("#")[0], (None, ""))[1] for text in texts}
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


def test_a_number_of_samples_is_asked_for_at_a_time_and_nobody_waits_for_the_slowest(tmp_path):
    """One request is held until all others are answered: batches that wait for each other would never end."""
    texts = [f"good {number}" for number in range(1, 400)]

    async def last(server, writer, text):
        while sum(server.requests.values()) < len(texts) + 1:
            await asyncio.sleep(0.01)
        writer.write(http(value(text)))

    with FaultServer({"held": (last, "")}) as server:
        data = write_samples(tmp_path / "d.jsonl", ["held", *texts])
        options = ["--model", server.address, "--yesno", "--concurrency", "7", "--out", str(tmp_path / "r")]
        assert run(["score", str(data), *options, "--export", str(tmp_path / "o.jsonl")]) == 0
    rows = rows_of(tmp_path / "o.jsonl")
    assert all(rows[text]["score"] == pytest.approx(score(text)) for text in texts)
    assert server.most_under_way == 7


def test_one_by_one_is_one_request_at_a_time(tmp_path):
    with FaultServer() as server:
        data = write_samples(tmp_path / "d.jsonl", GOOD[:9])
        options = ["--model", server.address, "--yesno", "--true-batch", "off", "--out", str(tmp_path / "r")]
        assert run(["score", str(data), *options]) == 0
    assert server.most_under_way == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_everybody_stops_the_run_and_records_nobody(tmp_path, capfd, monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    texts = [f"refused {number}" for number in range(300)]

    async def refuse(server, writer, text):
        writer.write(http({"error": f"no access with {server.authorization}"}, status))

    with FaultServer(dict.fromkeys(texts, (refuse, ""))) as server:
        data = write_samples(tmp_path / "d.jsonl", texts)
        command = ["score", str(data), "--model", server.address, "--yesno", "--concurrency", "8"]
        assert run([*command, "--out", str(tmp_path / "r")]) == 2
        assert sum(server.requests.values()) < 40  # not everybody was asked for
        assert run(["run", "status", str(tmp_path / "r")]) == 0
        told = "".join(capfd.readouterr())
        assert f"rejects every request ({status})" in told
        assert "0 failed, 300 pending" in told
        assert KEY not in told
        server.faults.clear()  # the key is right now
        assert run([*command, "--out", str(tmp_path / "r")]) == 0


def test_sigterm_waits_for_what_was_sent_and_the_same_command_goes_on(tmp_path):
    """Whatever the server has answered before the process ends is in the journal, and is not asked for again."""
    texts = [f"good {number}" for number in range(1, 300)]
    release = threading.Event()

    async def held(server, writer, text):
        while not release.is_set():
            await asyncio.sleep(0.01)
        writer.write(http(value(text)))

    slow = texts[::20]
    with FaultServer(dict.fromkeys(slow, (held, ""))) as server:
        data = write_samples(tmp_path / "d.jsonl", texts)
        options = ["--model", server.address, "--yesno", "--concurrency", "4", "--out", str(tmp_path / "r")]
        command = ["score", str(data), *options]

        def stop():
            while sum(server.requests[text] for text in slow) < 4:  # all places are taken by those that are held
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            release.set()

        thread = threading.Thread(target=stop)
        thread.start()
        assert run(command) == 75
        thread.join()
        answered = dict(server.requests)
        rows = {row["id"]: row for row in read_rows(tmp_path / "r")}
        assert {text for text, row in rows.items() if row["status"] == "ok"} == set(answered)
        assert set(answered) != set(texts)
        assert run(command) == 0
        assert set(server.requests.values()) == {1}


def test_failures_are_asked_for_again_with_a_key_that_is_named_again(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "another-key-of-mine")
    with FaultServer({"bad": (http({}, 422), "http_422")}) as server:
        data = write_samples(tmp_path / "d.jsonl", ["bad", "good 1"])
        options = ["--model", server.address, "--yesno", "--key-env", "MY_KEY", "--out", str(tmp_path / "r")]
        assert run(["score", str(data), *options]) == 3
        assert server.authorization == f"Bearer {KEY}"
        server.faults.clear()
        again = [
            "run",
            "retry",
            str(tmp_path / "r"),
            "--kind",
            "http_422",
            "--data",
            str(data),
            "--model",
            server.address,
        ]
        assert run([*again, "--key-env", "NOT_THERE_AT_ALL"]) == 2
        assert run([*again, "--key-env", "MY_KEY"]) == 0
        assert server.authorization == f"Bearer {KEY}"
    assert "key_env" not in (tmp_path / "r" / "call.json").read_text()
    assert "NOT_THERE_AT_ALL" not in "".join(capfd.readouterr())


MEASURED = """
import sys
from pathlib import Path
from truebatch.cli.app import run
code = run(sys.argv[1:])
print(*(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))
sys.exit(code)
"""
"""Its own peak: that of a child as its parent sees it would hold the parent's, too."""


def score_in_a_process(folder, texts, *options):
    """The exit code, the rows, the server, and the most memory the process had, in bytes."""
    folder.mkdir()
    data = write_samples(folder / "d.jsonl", texts)
    with FaultServer() as server:
        given = ["--model", server.address, "--served", "m", "--yesno", *options, "--out", str(folder / "r")]
        command = [sys.executable, "-c", MEASURED, "score", str(data), *given, "--export", str(folder / "o.jsonl")]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    most = int(process.stdout.rpartition("VmHWM:")[2].split()[0]) * 1024
    return process.returncode, rows_of(folder / "o.jsonl"), server, most


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rounds_of_every_fault_take_no_memory_and_end_at_the_deadline(tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    rounds, deadline = 5, 10.0
    faults = [f"{name}#{number}" for number in range(rounds) for name in FAULTS if name != FLOOD or number == 0]
    good = [f"good {number}" for number in range(1, 500)]
    options = ["--timeout", str(deadline), "--tries", "3"]
    usual = score_in_a_process(tmp_path / "usual", good, *options)
    assert usual[0] == 0
    code, rows, server, most = score_in_a_process(tmp_path / "faults", spread(faults, good), *options)
    late = max(server.seconds[text] for text in faults if FAULTS[text.partition("#")[0]][1] == "timeout")
    figures = {
        "trials": len(faults), "faults": len(FAULTS), "deadline_seconds": deadline,
        "longest_seconds": round(max(server.seconds.values()), 2), "more_megabytes": round((most - usual[3]) / 2**20, 1),
    }  # fmt: skip
    for name, figure in figures.items():
        record_property(name, figure)
    assert code == 3
    check_rows(rows, spread(faults, good))
    assert server.elsewhere == 0
    assert most - usual[3] < 64 * 2**20
    assert max(server.seconds.values()) < 2 * deadline
    assert late >= deadline  # it was the deadline that ended them
