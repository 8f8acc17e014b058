"""Addresses and keys: what may be a secret is neither shown nor kept, and goes nowhere but to the server that was named."""

from __future__ import annotations

import json

import pytest

from truebatch.cli.app import run
from truebatch.errors import ConfigError
from truebatch.io.http import is_loopback
from truebatch.io.server_address import check_key
from truebatch.language.console import mask_secrets
from truebatch.scoring.backends.http.address import endpoint, find_key, is_address
from truebatch.scoring.backends.http.openai import HttpBackend
from truebatch.scoring.readouts import Labels

SECRET = "hunter2zxqv"
WITH_SECRETS = (
    f"http://user:{SECRET}@127.0.0.1:9/v1",
    f"http://user:pa/{SECRET}@127.0.0.1:9/v1",
    f"http://{SECRET}@127.0.0.1:9/v1",
    f"https://example.invalid/v1?api_key={SECRET}",
    f"https://example.invalid/v1?{SECRET}",
    f"https://example.invalid/v1#{SECRET}",
    f"HTTPS://user:{SECRET}@example.invalid/v1",
    f"ftp://user:{SECRET}@example.invalid/v1",
    f"user:{SECRET}@example.invalid/v1",
    f"http://user:{SECRET} x@127.0.0.1:9/v1",
)


@pytest.mark.parametrize("address", WITH_SECRETS)
def test_an_address_with_a_secret_is_refused_unshown_and_nothing_is_written(address, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text(json.dumps({"user": "a"}) + "\n")
    (tmp_path / "runs" / "score-d").mkdir(parents=True)
    assert run(["score", "d.jsonl", "--model", address, "--yesno", "--fresh"]) == 2
    told = "".join(capfd.readouterr())
    assert SECRET not in told
    assert "***" in told
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["d.jsonl", "runs", "score-d"]


@pytest.mark.parametrize("address", WITH_SECRETS[:6])
def test_a_wrong_command_with_a_secret_in_it_does_not_show_it(address, capfd):
    assert run(["score", address]) == 2
    assert run(["scroe", "d.jsonl", "--model", address]) == 2
    assert SECRET not in "".join(capfd.readouterr()).replace(f"#{SECRET}", "")


def test_addresses_that_are_none():
    assert endpoint("http://h:8/v1/") == "http://h:8/v1/chat/completions"
    assert endpoint("https://h/a?api-version=3") == "https://h/a/chat/completions?api-version=3"
    for wrong in ("http://", "http://h:99999/v1", "http://h:x/v1", "http://a b/v1", "http://h\\@e/v1"):
        with pytest.raises(ConfigError, match=r"not a server address|must not contain a user name"):
            endpoint(wrong)
    assert not is_address("./qwen")
    assert not is_address("scripted")
    assert is_address("HTTP://h/v1")
    here, elsewhere = ("localhost", "127.9.9.9", "[::1]"), ("10.0.0.1", "localhost.evil.org", "0.0.0.0")
    assert all(is_loopback(f"http://{host}/v1") for host in here)
    assert not any(is_loopback(f"http://{host}/v1") for host in elsewhere)
    assert mask_secrets("see https://u:p@h/a?b=c&d, then") == "see https://***@h/a?b=***&*** then"


def test_a_key_is_found_and_never_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f" {SECRET}\n")
    monkeypatch.setenv("EMPTY", "")
    assert (find_key(None), find_key("")) == (SECRET, "")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert find_key(None) == ""
    for wrong in ("EMPTY", SECRET, f"sk-{SECRET}", "A B"):  # the key itself, where its name was meant
        with pytest.raises(ConfigError) as found:
            find_key(wrong)
        assert wrong not in str(found.value)


def test_a_key_goes_over_plain_http_to_this_machine_only():
    check_key("http://127.0.0.1:8/v1", SECRET)
    check_key("https://example.invalid/v1", SECRET)
    check_key("http://example.invalid/v1", "")
    with pytest.raises(ConfigError, match="plain http") as found:
        check_key("http://example.invalid/v1", SECRET)
    assert SECRET not in str(found.value)
    for wrong in (f"{SECRET}\nX: y", f"{SECRET} b", f"{SECRET}é"):
        with pytest.raises(ConfigError) as found:
            check_key("https://example.invalid/v1", wrong)
        assert SECRET not in str(found.value)


def test_a_backend_shows_no_key():
    backend = HttpBackend("https://example.invalid/v1", "m", Labels({"1": 1, "2": 2}), key=SECRET)
    assert SECRET not in f"{backend!r} {backend} {backend.describe()}"


@pytest.mark.parametrize(
    "options",
    [
        ["--cells", "64"], ["--level", "shape"], ["--dtype", "float32"], ["--device", "cpu"], ["--workers", "2"],
        ["--true-batch", "compare"], ["--prefix", "{"], ["--tries", "0"], ["--concurrency", "0"], ["--answer-bytes", "-1"],
        ["--timeout", "0"], ["--timeout", "nan"], ["--engine", "ray"], ["--compile"],
    ],
)  # fmt: skip
def test_what_a_server_cannot_be_told_is_refused(options, tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"user": "a"}) + "\n")
    command = ["score", str(tmp_path / "d.jsonl"), "--yesno", "--out", str(tmp_path / "r")]
    assert run([*command, "--model", "http://127.0.0.1:9/v1", *options]) == 2
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", ["--tries", "--concurrency", "--answer-bytes", "--key-env"])
def test_what_belongs_to_a_server_is_refused_without_one(name, tmp_path, capfd):
    (tmp_path / "d.jsonl").write_text(json.dumps({"user": "a"}) + "\n")
    assert run(["score", str(tmp_path / "d.jsonl"), "--yesno", "--model", "scripted", name, "3"]) == 2
    assert "only for a server" in capfd.readouterr().err
