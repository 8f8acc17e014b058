"""A server that judges and fails in every way we know of: the last message of a request names the fault it plays.

`good N` gets an answer of its own, so that an answer given to another sample is seen. What stands behind a `#` only
makes another sample of the same fault.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from contextlib import suppress

MANY = b"x" * 65536
JSON_TYPE = (("Content-Type", "application/json"),)


def chance(text):
    """The probability of Yes that belongs to a sample: each good one has another."""
    return 0.2 + 0.001 * (int(text.split()[1]) % 500) if text.startswith("good ") else 0.2


def score(text):
    return chance(text) / (chance(text) + 0.25)


def choice(text="good 0", top=None):
    yes = {"token": "Yes", "logprob": math.log(chance(text))}
    top = [yes, {"token": "No", "logprob": math.log(0.25)}] if top is None else top
    return {
        "index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "Yes"},
        "logprobs": {"content": [{"token": "Yes", "logprob": -0.1, "top_logprobs": top}]},
    }  # fmt: skip


def value(text="good 0", **changes):
    return {"id": "c", "object": "chat.completion", "choices": [choice(text)], "usage": {"total_tokens": 9}} | changes


def http(body, status=200, headers=JSON_TYPE, length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {said}" for name, said in headers)]
    lines += [f"Content-Length: {len(body) if length is None else length}"] if length != "none" else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def judged(**one):
    """An answer with one more likeliest token, such as no server should give."""
    yes, no = choice()["logprobs"]["content"][0]["top_logprobs"]
    return http(value(choices=[choice(top=[yes | one, no])]))


def spelled(number):
    """An answer with a log-probability that is written so."""
    return http(
        json.dumps(value(choices=[choice(top=[{"token": "Yes", "logprob": 12345}])])).encode().replace(b"12345", number)
    )


def inside(**logprobs):
    return http(value(choices=[choice() | {"logprobs": logprobs}]))


def chunked(*chunks):
    head = http(b"", headers=(*JSON_TYPE, ("Transfer-Encoding", "chunked")), length="none")
    return head + b"".join(chunks)


def packed(body, name):
    return http(body, headers=(*JSON_TYPE, ("Content-Encoding", name)))


def reset_after(first):
    async def play(server, writer, text):
        writer.write(first)
        await writer.drain()
        await asyncio.sleep(0.02)  # for what was sent to arrive before the reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    return play


def endless(first, more):
    async def play(server, writer, text):
        writer.write(first)
        while True:
            writer.write(more)
            await writer.drain()

    return play


def dripping(first, more=b"1"):
    async def play(server, writer, text):
        writer.write(first)
        while True:
            writer.write(more)
            await writer.drain()
            await asyncio.sleep(server.drip_seconds)

    return play


def once(fault):
    """The fault at the first try of a sample, a good answer afterwards."""

    async def play(server, writer, text):
        if server.requests[text] == 1:
            await server.play(fault, writer, text)
        else:
            writer.write(http(value(text)))

    return play


async def silence(server, writer, text):
    await asyncio.sleep(3600)


async def twice(server, writer, text):
    """A second answer behind the first: on a connection that is used again it would be that of another sample."""
    writer.write(http(value(text)) + http(value("good 499")))
    await writer.drain()
    await asyncio.sleep(0.2)


async def key_in_answer(server, writer, text):
    writer.write(http(value(choices=[choice(top=[{"token": server.authorization, "logprob": -0.1}])])))


async def key_in_error(server, writer, text):
    writer.write(http({"error": f"wrong: {server.authorization}"}, 400))


def _moved(status):
    return http(b"", status, (("Location", "/elsewhere"),))


OK, BAD, HTTP, CUT, LATE, LARGE = "", "bad_answer", "bad_http", "connection_broken", "timeout", "too_large"
BOMB = zlib.compress(b"[" + b" " * (1 << 28) + b"]", 9)
GZIP_BOMB = gzip.compress(b" " * (1 << 28), 9)
DEEP = b"[" * 100_000 + b"]" * 100_000
FAULTS = {
    # the connection
    "reset at once": (reset_after(b""), CUT),
    "reset in the headers": (reset_after(b"HTTP/1.1 200 OK\r\nContent-"), CUT),
    "reset in the body": (reset_after(http(value())[:-20]), CUT),
    "closed without a word": (b"", HTTP),
    "closed in the status line": (b"HTTP/1.", HTTP),
    "closed in the headers": (b"HTTP/1.1 200 OK\r\nContent-Type: app", HTTP),
    "reset once": (once(reset_after(b"")), OK),
    "closed once": (once(b""), OK),
    # the protocol
    "noise": (bytes(range(256)) * 8, HTTP),
    "another protocol": (b"SSH-2.0-OpenSSH_9.9\r\n", HTTP),
    "a body without headers": (json.dumps(value()).encode(), HTTP),
    "a header without an end": (endless(b"HTTP/1.1 200 OK\r\nX: ", MANY), HTTP),
    "headers without an end": (endless(b"HTTP/1.1 200 OK\r\n", b"X-More: 1\r\n" * 4096), HTTP),
    "beginnings without an end": (dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), LATE),
    "a flood of beginnings": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 64), LATE),
    "an upgrade": (http(b"", 101, (("Upgrade", "x"), ("Connection", "Upgrade"))), HTTP),
    "two lengths": (http(value(), headers=(*JSON_TYPE, ("Content-Length", "3"))), HTTP),
    "a length of words": (http(value(), length="many"), HTTP),
    "a length below zero": (http(value(), length="-5"), HTTP),
    "a length too long": (http(value(), length=100_000), HTTP),
    "a length too short": (http(value(), length=40), BAD),
    "a chunk cut off": (chunked(b"ff\r\n{"), HTTP),
    "chunks without an end": (chunked(b"2\r\n{}\r\n"), HTTP),
    "a chunk of words": (chunked(b"zz\r\n{}\r\n0\r\n\r\n"), HTTP),
    "two answers": (twice, OK),
    "a cookie": (http(value(), headers=(*JSON_TYPE, ("Set-Cookie", "sample=1; Path=/"))), OK),
    # time
    "silence": (silence, LATE),
    "silence after the headers": (dripping(http(b"", length=50), b""), LATE),
    "a byte at a time, status": (dripping(b"HTTP/1.1 200 "), LATE),
    "a byte at a time, headers": (dripping(b"HTTP/1.1 200 OK\r\nX: "), LATE),
    "a byte at a time, body": (dripping(http(b"", length=10_000)), LATE),
    "a byte at a time, chunks": (dripping(chunked(), b"1\r\n \r\n"), LATE),
    # size
    "a body without an end": (endless(http(b"", length="none"), MANY), LARGE),
    "chunks of a body without an end": (endless(chunked(), b"10000\r\n" + MANY + b"\r\n"), LARGE),
    "a length beyond all": (endless(http(b"", length=1 << 50), MANY), LARGE),
    "a gzip bomb": (packed(GZIP_BOMB, "gzip"), LARGE),
    "a deflate bomb": (packed(BOMB, "deflate"), LARGE),
    "a list of lists": (http(b"[" + b"[]," * 80_000 + b"[]]"), BAD),
    # packing
    "gzip cut off": (packed(gzip.compress(json.dumps(value()).encode())[:-9], "gzip"), BAD),
    "gzip that is none": (packed(json.dumps(value()).encode(), "gzip"), BAD),
    "an unknown packing": (packed(json.dumps(value()).encode(), "br"), BAD),
    "packed twice": (packed(gzip.compress(gzip.compress(b"{}")), "gzip, gzip"), BAD),
    "gzip": (packed(gzip.compress(json.dumps(value()).encode()), "gzip"), OK),
    # other statuses
    **{f"sent on with {status}": (_moved(status), "redirect") for status in (301, 302, 303, 307, 308)},
    "not modified": (http(b"", 304, length="none"), "redirect"),
    **{f"status {status}": (http(value(), status), f"http_{status}") for status in (201, 202, 206, 226)},
    "no content": (http(b"", 204, length="none"), "http_204"),
    **{f"status {n}": (http({"error": "no"}, n), f"http_{n}") for n in (400, 401, 403, 404, 408, 409, 413, 422, 451)},
    **{f"status {status}": (http({"error": "busy"}, status), f"http_{status}") for status in (500, 502, 503, 504, 529)},
    "a status beyond all": (http(value(), 999), "http_999"),
    "too many": (http({"error": "slow"}, 429, (("Retry-After", "0"),)), "http_429"),
    "too many, nonsense": (http({"error": "slow"}, 429, (("Retry-After", "soon \xff"),)), "http_429"),
    "too many, once": (once(http({"error": "slow"}, 429, (("Retry-After", "1"),))), OK),
    "busy once": (once(http({"error": "slow"}, 503, (("Retry-After", "Wed, 21 Oct 2015 07:28:00 GMT"),))), OK),
    "an error without an end": (endless(http(b"", 400, length="none"), MANY), "http_400"),
    # the body
    "nothing": (http(b""), BAD),
    "a page": (http(b"<html>", headers=(("Content-Type", "text/html"),)), BAD),
    "an answer that is said to be a page": (http(value(), headers=(("Content-Type", "text/html"),)), BAD),
    "a stream": (http(b"data: {}\n\n", headers=(("Content-Type", "text/event-stream"),)), BAD),
    "not UTF-8": (http(b'{"choices": "\xff"}'), BAD),
    "UTF-16": (http(json.dumps(value()).encode("utf-16")), BAD),
    "half a character": (judged(token="\ud800"), BAD),
    "JSON cut off": (http(json.dumps(value()).encode()[:-5]), BAD),
    "JSON and more": (http(json.dumps(value()).encode() * 2), BAD),
    "a list": (http([value()]), BAD),
    "null": (http(b"null"), BAD),
    "a number of 5,000 digits": (http(b"9" * 5000), BAD),
    "deep": (http(DEEP), BAD),
    "a deep choice": (http(b'{"choices": ' + DEEP + b"}"), BAD),
    "a key twice": (http(json.dumps(value()).encode()[:-1] + b', "choices": []}'), BAD),
    "a token with two names": (http(json.dumps(value()).encode().replace(b'"token":', b'"token": "", "token":')), BAD),
    "an error with status 200": (http({"error": {"message": "overloaded"}}), BAD),
    "no choices": (http({"usage": {"total_tokens": 1}}), BAD),
    "choices of none": (http(value(choices=[])), BAD),
    "choices of null": (http(value(choices=None)), BAD),
    "choices of two": (http(value(choices=[choice(), choice()])), BAD),
    "choices by name": (http(value(choices={"0": choice()})), BAD),
    "choices of words": (http(value(choices=["Yes"])), BAD),
    "no logprobs": (http(value(choices=[choice() | {"logprobs": None}])), BAD),
    "logprobs of words": (http(value(choices=[choice() | {"logprobs": "Yes"}])), BAD),
    "logprobs of nothing": (inside(content=[]), BAD),
    "logprobs of null": (inside(content=[None]), BAD),
    "no likeliest tokens": (inside(content=[{"top_logprobs": []}]), BAD),
    "likeliest tokens by name": (inside(content=[{"top_logprobs": {"Yes": -0.1}}]), BAD),
    "a likeliest token of words": (inside(content=[{"top_logprobs": ["Yes"]}]), BAD),
    "no label": (inside(content=[{"top_logprobs": [{"token": "Hm", "logprob": -0.1}]}]), "no_mass"),
    "no chance at all": (inside(content=[{"top_logprobs": [{"token": "Yes", "logprob": -9999}]}]), "no_mass"),
    # numbers
    "log-probability 3": (judged(logprob=3.0), BAD),
    "log-probability 0.01": (judged(logprob=0.01), BAD),
    "log-probability NaN": (spelled(b"NaN"), BAD),
    "log-probability Infinity": (spelled(b"Infinity"), BAD),
    "log-probability -Infinity": (spelled(b"-Infinity"), BAD),
    "log-probability 1e999": (spelled(b"1e999"), BAD),
    "log-probability -1e999": (spelled(b"-1e999"), BAD),
    "log-probability of 400 digits": (spelled(b"-" + b"9" * 400), BAD),
    "log-probability null": (judged(logprob=None), BAD),
    "log-probability true": (judged(logprob=True), BAD),
    "log-probability in words": (judged(logprob="-0.5"), BAD),
    "a token that is a number": (judged(token=7), BAD),
    "probabilities of 2": (judged(logprob=0.0), BAD),
    "usage null": (http(value(usage=None)), OK),
    "no usage": (http({"choices": [choice()]}), OK),
    "usage in words": (http(value(usage="9")), BAD),
    "usage below zero": (http(value(usage={"total_tokens": -9})), BAD),
    "usage beyond all": (http(value(usage={"total_tokens": 10**30})), BAD),
    "usage of a half": (http(value(usage={"total_tokens": 1.5})), BAD),
    "usage without a total": (http(value(usage={})), BAD),
    # the key
    "the key in the answer": (key_in_answer, "key_in_answer"),
    "the key in an error": (key_in_error, "http_400"),
}  # fmt: skip
"""A fault -> how it is played, and the kind of the record it must end in; no kind: it is answered all the same."""


class FaultServer:
    """On this machine, in a thread of its own, while it is entered."""

    def __init__(self, faults=FAULTS, drip_seconds=0.2):
        self.faults, self.drip_seconds = faults, drip_seconds
        self.requests, self.elsewhere, self.seconds = Counter(), 0, {}
        self.authorization = ""
        self.under_way = self.most_under_way = 0
        self._loop = asyncio.new_event_loop()

    def __enter__(self):
        ready = threading.Event()

        async def start():
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
            self.port = self._server.sockets[0].getsockname()[1]
            ready.set()

        self._loop.create_task(start())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        assert ready.wait(600)
        self.address = f"http://127.0.0.1:{self.port}/v1"
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(600)
        self._loop.close()

    async def _end(self):
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader, writer):
        began, text = time.monotonic(), "?"
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        gone = playing = None
        try:
            text, playing = await self._begin(reader, writer)
            gone = asyncio.ensure_future(reader.read())
            await asyncio.wait({playing, gone}, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.under_way -= 1
            self.seconds[text] = max(self.seconds.get(text, 0.0), time.monotonic() - began)
            for task in (playing, gone):
                if task is not None:
                    task.cancel()
                    with suppress(OSError, asyncio.CancelledError):
                        await task
            writer.close()

    async def _begin(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        raw = {
            line.split(": ", 1)[0].lower(): line.split(": ", 1)[1] for line in head.split("\r\n")[1:] if ": " in line
        }
        self.authorization = raw.get("authorization", "")
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if "/elsewhere" in head.split("\r\n")[0]:
            self.elsewhere += 1
            return "elsewhere", asyncio.ensure_future(self.play(http(value()), writer, ""))
        text = json.loads(body)["messages"][-1]["content"]
        self.requests[text] += 1
        return text, asyncio.ensure_future(
            self.play(self.faults.get(text.partition("#")[0], (None, OK))[0], writer, text)
        )

    async def play(self, fault, writer, text):
        if fault is None:
            fault = http(value(text))
        if isinstance(fault, bytes):
            writer.write(fault)
            await writer.drain()
        else:
            await fault(self, writer, text)
            with suppress(OSError):
                await writer.drain()
