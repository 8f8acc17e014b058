"""A run is watched without being touched: in the terminal and as a page that only this machine can read."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from truebatch.cli.app import run as truebatch
from truebatch.errors import ConfigError, RunError
from truebatch.reports.live_page import LiveReport, open_server
from truebatch.reports.plots import moving_average
from truebatch.reports.sections.run import run_sections
from truebatch.reports.watch import LogTail, RunWatch, watch_runs

DONE = {"state": "done", "step": 30, "num_steps": 30, "starts": 3, "exit_code": 0, "message": "all"}
EQUAL = {"samples": 8, "loss": 1e-7, "gradient": 3e-7, "verdict": "equal"}


def record(step):
    more = {"tokens": 100, "seconds": 0.5, "fill": 0.95 + 0.001 * (step % 2), "learning_rate/main": 0.001}
    return json.dumps({"step": step, "loss": 3.0 / step, **more}) + "\n"


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "a run"
    run.mkdir()
    (run / "status.json").write_text(json.dumps({**DONE, "equality": EQUAL}))
    (run / "metrics.jsonl").write_text("".join(record(step) for step in range(1, 31)))
    return run


@pytest.fixture
def served(folder):
    with open_server(LiveReport([folder]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, server.server_port
        server.shutdown()
        thread.join()


def get(port, path="/", host=None, method="GET"):
    """The status and the text of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_a_report_begins_with_what_the_run_came_to(folder):
    (folder / "quarantine.jsonl").write_text("{}\n{}\n")
    first = next(iter(run_sections(folder)))
    assert first.title == "In short"
    assert first.words == [
        "all 30 steps are done",
        "equal to one sample at a time: 8 samples compared, loss 1e-07, gradient 3e-07 apart",
        "loss 3.0000 at the first step, 0.1000 at the last",
        "200 tokens per second in the second half of the run",
        "95.0% of the cells held tokens, the rest padding",
        "restarted 2 time(s)",
        "2 sample(s) left out, because they did not fit in memory",
    ]
    assert [section.title for section in run_sections(folder)][-1] == "Run"


def test_what_never_changes_is_a_sentence_and_no_picture(folder):
    speed = next(section for section in run_sections(folder) if section.title.startswith("Speed"))
    assert speed.words == ["learning_rate/main: 0.001 at every step"]
    assert len(speed.drawn) == 1


def test_a_moving_average_keeps_the_level_and_loses_the_noise():
    values = [1.0 + (-1) ** n for n in range(300)]
    smooth = moving_average(values)
    assert len(smooth) == 300
    assert max(abs(value - 1.0) for value in smooth[100:]) < 0.1


def test_the_page_follows_the_run_and_asks_the_browser_to_come_back(served):
    folder, port = served
    _, before = get(port)
    assert '<meta http-equiv="refresh" content="5">' in before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(record(31))
    assert "0.0968" not in before
    assert "0.0968" in get(port)[1]


@pytest.mark.parametrize(
    ("path", "host", "method", "code"),
    [
        ("/config.yaml", None, "GET", 404),
        ("/../../etc/passwd", None, "GET", 404),
        ("/", "elsewhere.example", "GET", 403),
        ("/", None, "POST", 501),
        ("/", None, "DELETE", 501),
    ],
)
def test_a_request_gets_the_page_or_nothing(served, path, host, method, code):
    assert get(served[1], path, host, method)[0] == code


def test_a_damaged_log_is_told_on_the_page_and_the_server_goes_on(served):
    folder, port = served
    good = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("no json\n")
    assert "damaged in line 1" in get(port)[1]
    (folder / "metrics.jsonl").write_text(good)
    assert "all 30 steps are done" in get(port)[1]


def test_a_port_that_is_taken_is_named(folder):
    with open_server(LiveReport([folder]), 0) as server, pytest.raises(ConfigError, match="cannot be used"):
        open_server(LiveReport([folder]), server.server_port)


def test_only_this_machine_is_served(folder):
    with open_server(LiveReport([folder]), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_the_command_serves_until_it_is_interrupted(folder):
    command = [sys.executable, "-m", "truebatch", "report", str(folder), "--watch"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        address = process.stdout.readline().split()[1]
        assert "all 30 steps are done" in get(int(address.rsplit(":", 1)[1].strip("/")))[1]
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 75


def test_a_watched_log_is_read_once_and_a_torn_line_waits(tmp_path):
    log = LogTail(tmp_path / "metrics.jsonl")
    log.update()
    assert not log.records
    log.path.write_text(record(1) + record(2)[:20])
    log.update()
    assert [one["step"] for one in log.records] == [1]
    log.path.write_text(record(1) + record(2) + '{"step": 2, "validation_loss": 1}\n' + "damaged\n")
    log.update()
    assert [one["step"] for one in log.records] == [1, 2]
    log.path.write_text(record(7))
    log.update()
    assert [one["step"] for one in log.records] == [7]


HUGE, DEEP = "9" * 4000, "[" * 100_000
STRANGE_LOGS = {
    "NaN and infinity": '{"step":1,"tokens":NaN,"seconds":Infinity,"loss":NaN,"fill":-Infinity}',
    "numbers no float holds": f'{{"step":1,"tokens":{HUGE},"seconds":{HUGE},"loss":{HUGE}}}',
    "a step no clock counts": f'{{"step":{HUGE},"tokens":1,"seconds":1}}',
    "texts for numbers": '{"step":1,"tokens":"x","seconds":[1],"loss":"\\u001b[2J","fill":{}}',
    "years left": '{"step":1,"tokens":5,"seconds":1e299}',
    "a negative time": '{"step":1,"tokens":1e299,"seconds":-1e-299}',
    "nested": '{"step":1,"tokens":' + DEEP,
    "large sums": '{"step":1,"tokens":1e299,"seconds":1e-299,"loss":1e299,"fill":1e299}',
}
STRANGE_STATUS = {
    "escapes": {"state": "\x1b[2J\x1b]0;x\x07", "equality": {"verdict": "\x1b[2J"}, "message": "\x1b[2J"},
    "no state": {"state": None, "equality": {"verdict": None}},
    "lists": {"state": [1], "step": [2], "num_steps": [3], "equality": [4]},
    "texts": {"state": "done", "step": "\x1b[31m", "num_steps": "x"},
    "numbers beyond": {"state": "running", "step": -(10**4000), "num_steps": 10**400},
    "a long state": {"state": "x" * 100_000, "equality": {"verdict": "y" * 100_000}},
}


@pytest.mark.parametrize("log", STRANGE_LOGS.values(), ids=list(STRANGE_LOGS))
@pytest.mark.parametrize("status", STRANGE_STATUS.values(), ids=list(STRANGE_STATUS))
def test_a_strange_folder_is_watched_without_a_fault_or_an_escape(folder, log, status):
    (folder / "metrics.jsonl").write_text(log + "\n")
    (folder / "status.json").write_text(json.dumps({**DONE, **status}))
    out = io.StringIO()
    row = RunWatch(folder, "a").row()
    assert len(row) == 8
    assert all(len(cell) < 100 for cell in row)
    if status.get("state") != "running":
        watch_runs([folder], out)
        assert "\x1b" not in out.getvalue()
        assert len(out.getvalue().splitlines()) == 1


def test_a_folder_that_stays_unreadable_is_watched_no_longer(folder):
    (folder / "status.json").write_text("[1]")
    out = io.StringIO()
    watch_runs([folder], out, seconds=0.0)
    assert len(out.getvalue().splitlines()) == 1
    watched = RunWatch(folder, "a")
    watched.row()
    (folder / "status.json").write_text(json.dumps({**DONE, "state": "new"}))
    assert watched.row()[2] == "30/30"
    assert (watched.failures, watched.is_running) == (0, True)


def test_of_a_log_of_gigabytes_the_end_is_read(folder):
    os.truncate(folder / "metrics.jsonl", 8 << 30)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n" + "".join(record(step) for step in range(1, 21)))
    row = RunWatch(folder, "a").row()
    assert (row[2], row[4]) == ("20/30", "200 tokens/s")
    log = LogTail(folder / "metrics.jsonl")
    log.update()
    assert log.read == (folder / "metrics.jsonl").stat().st_size


def test_watching_ends_with_the_runs_and_says_where_they_stand(folder):
    out = io.StringIO()
    watch_runs([folder], out)
    said = "run a run  state done  done 30/30  loss 0.1000  speed 200 tokens/s  fill 95%  equality equal\n"
    assert out.getvalue() == said


def test_watching_goes_on_while_a_run_does(folder):
    running = {**DONE, "state": "running", "pid": os.getpid()}
    told = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**told, **running}))
    out = io.StringIO()
    watching = threading.Thread(target=watch_runs, args=([folder], out), kwargs={"seconds": 0.01})
    watching.start()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(record(31))
    while "31/30" not in out.getvalue():
        assert watching.is_alive()
    (folder / "status.json").write_text(json.dumps(DONE))
    watching.join()
    assert out.getvalue().splitlines()[-1].startswith("run a run  state done")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "{run}", "--watch", "--out", "x.html"], "--watch writes no file"),
        (["report", "{run}", "--watch", "--text"], "--watch writes no file"),
        (["report", "{run}", "--port", "8000"], "--port belongs to --watch"),
        (["watch", "{run}/nothing"], "is not a run"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, capsys, words, said):
    assert truebatch([word.format(run=folder) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_must_be_there():
    with pytest.raises(ConfigError):
        watch_runs([], io.StringIO())
    with pytest.raises(RunError):
        LiveReport([Path("nothing")])
