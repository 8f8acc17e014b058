"""The client of servers: pauses between tries, bodies within their limit, and the library it is made of."""

from __future__ import annotations

import asyncio
import gzip
import sys
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from tests.scoring.backends.http.fault_server import FaultServer, http
from truebatch.errors import ConfigError
from truebatch.io.http import http_library
from truebatch.scoring.backends.http.client import (
    LONGEST_PAUSE,
    HttpClient,
    HttpSettings,
    RequestError,
    pause_seconds,
    read_body,
)


def test_pauses_grow_are_spread_and_have_an_end():
    assert [pause_seconds(0.5, number, 1.0) for number in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert [pause_seconds(0.5, number, 0.0) for number in (1, 2, 3, 4)] == [0.25, 0.5, 1.0, 2.0]
    assert pause_seconds(0.5, 5000, 1.0) == LONGEST_PAUSE


def test_a_server_says_when_to_come_back_in_seconds_or_as_a_date():
    assert pause_seconds(0.5, 1, 1.0, "7") == 7.0
    assert pause_seconds(0.5, 4, 1.0, "1") == 4.0  # never sooner than without it
    assert pause_seconds(0.5, 1, 1.0, "9" * 5000) == LONGEST_PAUSE
    in_half_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=40), usegmt=True)
    assert 5 < pause_seconds(0.5, 1, 1.0, in_half_a_minute) <= 40
    assert pause_seconds(0.5, 1, 1.0, "Wed, 21 Oct 2015 07:28:00 GMT") == 0.5
    far = "Wed, 21 Oct 2199 07:28:00 -0000"
    assert pause_seconds(0.5, 1, 1.0, far) == LONGEST_PAUSE
    for nonsense in ("", "soon", "-5", "1e9", "٣", "Wed, 99 Oct 2015 99:99:99 GMT", "\x00"):
        assert pause_seconds(0.5, 1, 1.0, nonsense) == 0.5


def body_of(chunks, packing="", most=100):
    async def read():
        async def come():
            for chunk in chunks:
                yield chunk

        return await read_body(come(), packing, most)

    return asyncio.run(read())


def test_a_body_has_its_limit_packed_and_unpacked():
    text = bytes(range(100))
    assert body_of([text]) == body_of([text[:50], text[50:]]) == text
    for name, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        packed = pack(b"a" * 100)
        assert body_of([packed], name) == body_of([packed[i : i + 1] for i in range(len(packed))], name) == b"a" * 100
        for wrong in (pack(b"a" * 101), pack(b"a" * (1 << 24))):
            with pytest.raises(RequestError, match="more than 100 bytes"):
                body_of([wrong], name)
        for wrong in (packed[:-1], packed + b"x", packed * 2, b"a"):
            with pytest.raises(RequestError, match=r"truncated|cannot be decompressed"):
                body_of([wrong], name)
    with pytest.raises(RequestError, match="more than 100 bytes"):
        body_of([b"a" * 101])
    with pytest.raises(RequestError, match="not requested"):
        body_of([b"a"], "br")


def test_a_request_is_tried_as_often_as_is_said():
    settings = HttpSettings(tries=4, pause=0.001, timeout=60)
    with FaultServer({"x": (http({}, 503), "")}) as server:
        client = HttpClient(server.address, "", settings)
        with pytest.raises(RequestError, match="tried 4 times") as found:
            client.submit(b'{"messages": [{"content": "x"}]}').future.result(60)
        client.close()
    assert found.value.kind == "http_503"
    assert server.requests["x"] == 4


def test_both_names_of_the_library_will_do_and_without_it_the_command_is_named(monkeypatch):
    assert http_library().__name__ in ("httpx2", "httpx")
    monkeypatch.setitem(sys.modules, "httpx2", None)
    monkeypatch.setitem(sys.modules, "httpx", sys)  # any module of that name
    assert http_library() is sys
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match="httpx2") as found:
        http_library()
    assert found.value.do == "pip install 'truebatch[http]'"
