"""What a run folder names - files, servers, programs - is not used unless the user says the same."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from truebatch.cli.app import run


@pytest.fixture
def server():
    """A server on this machine that keeps what is sent to it."""
    heard = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_error(500)

        def do_GET(self):
            heard.append(self.path.encode())
            self.send_error(500)

        def log_message(self, *_):
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listener.server_port}/v1", heard
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def scored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = [{"id": "a", "user": "fine"}, {"id": "b", "user": "bad", "options": {"fail": "raise"}}]
    Path("mine.jsonl").write_text("".join(json.dumps(one) + "\n" for one in data))
    assert run(["score", "mine.jsonl", "--model", "scripted", "--yesno", "--out", "r"]) == 3
    return tmp_path


def files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"}


def rewritten(**values):
    call = Path("r/call.json")
    call.write_text(json.dumps(json.loads(call.read_text()) | values))


RETRY = ["run", "retry", "r", "--kind", "raised"]


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--data", "mine.jsonl"],
        ["--data", "mine.jsonl", "--model", "scripted"],
        ["--data", "secret.jsonl", "--model", "scripted"],
        ["--data", "secret.jsonl"],
    ],
)
def test_a_folder_that_names_a_file_and_a_server_sends_nothing(scored, server, given, capsys):
    address, heard = server
    Path("secret.jsonl").write_text('{"user": "my password"}\n')
    rewritten(data=str(scored / "secret.jsonl"), model=address)
    before = files(scored / "r")
    capsys.readouterr()
    assert run([*RETRY, *given]) == 2
    said = capsys.readouterr()
    assert heard == []
    assert files(scored / "r") == before
    assert f"model: {address} in the folder" in said.err
    assert "my password" not in said.out + said.err


def test_what_the_user_says_again_is_judged_again(scored, server, capsys, monkeypatch):
    assert run(RETRY) == 2
    assert "--data " + str(scored / "mine.jsonl") in capsys.readouterr().err
    assert run([*RETRY, "--data", "mine.jsonl", "--model", "scripted"]) == 3
    Path("deep").mkdir()
    monkeypatch.chdir("deep")
    assert run(["run", "retry", "../r", "--kind", "raised", "--data", "../mine.jsonl", "--model", "scripted"]) == 3
    assert run(["run", "retry", "../r", "--kind", "raised", "--data", "mine.jsonl", "--model", "scripted"]) == 2
    assert server[1] == []


@pytest.mark.parametrize("values", [{"workers": 3}, {"engine": "ray", "workers": 1}])
def test_a_folder_starts_no_processes_of_its_own(scored, values, capsys, monkeypatch):
    import subprocess

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    rewritten(**values)
    assert run([*RETRY, "--data", "mine.jsonl", "--model", "scripted"]) == 2
    assert "in the folder, nothing from you" in capsys.readouterr().err


def test_a_benchmark_is_retried_with_the_settings_of_the_user_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = ["--set", "benchmark.samples=2"]
    begun = run(["vl_reward", "run", *own, "--set", "evaluation.output_dir=b"])
    assert begun in (0, 1, 3)
    again = ["run", "retry", "b", "--kind", "raised"]
    assert run(again) == 2
    assert "benchmark.samples: 2 in the folder, 24 from you" in capsys.readouterr().err
    assert run([*again, *own]) == begun
    settings = Path("b/run.yaml")
    whole = settings.read_text()
    for name, value in (("python_path", "./evil"), ("timeout", "7.0"), ("class_path", "evil:Pipeline")):
        settings.write_text(re.sub(rf"^( +){name}: .*$", rf"\g<1>{name}: {value}", whole, flags=re.MULTILINE))
        before = files(tmp_path / "b")
        assert run([*again, *own]) == 2
        assert f"{value} in the folder" if value == "7.0" else f"{value!r} in the folder" in capsys.readouterr().err
        assert files(tmp_path / "b") == before
