"""HTTP client for one server: concurrent, isolated requests, each with a deadline, a byte limit and retries.

request -> a free slot -> connect, send, read, all inside one deadline -> retry after a pause, or the reply

Every request has its own connection: otherwise surplus data would be read as the response to the next.
"""

from __future__ import annotations

import asyncio
import random
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from truebatch.errors import ConfigError
from truebatch.io.http import http_library, open_client
from truebatch.scoring.backends.http.address import endpoint
from truebatch.scoring.backends.interface import SampleError

ANSWER_BYTES, TOKEN_BYTES = 1 << 18, 64
"""Bytes of a response, plus some for each new token: more than a real one needs."""
LONGEST_PAUSE = 60.0
"""Seconds; a server that requests a longer wait is retried after this long."""
_JSON = {"Content-Type": "application/json"}
_ERROR_BYTES = 1 << 16
"""Bytes to read of an error response: its beginning gives the reason."""
_CLOSE_SECONDS = 5.0
_BEYOND = 1e9
"""Upper bound of all settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """Request settings; none of them changes a result."""

    timeout: float = 600.0
    """Seconds for one whole attempt: connecting, sending, and receiving the complete response."""
    concurrency: int = 64
    """Maximum number of concurrent requests."""
    tries: int = 5
    """Attempts per request if the server is busy or the connection breaks."""
    answer_bytes: int | None = None
    """Maximum bytes of one response, also after decompression. None: 262,144 plus 64 per new token."""
    pause: float = 0.5
    """Seconds before the second attempt; doubled before each further one."""

    def __post_init__(self) -> None:
        for name, kind in (("timeout", int | float), ("concurrency", int), ("tries", int), ("answer_bytes", int)):
            value = getattr(self, name)
            if name == "answer_bytes" and value is None:
                continue
            if not isinstance(value, kind) or not 0 < value < _BEYOND:
                raise ConfigError(f"{name} is out of range", seen=f"{name}={value!r}", do="give 1 or more")


@dataclass(frozen=True, slots=True)
class Reply:
    """A response with status 200."""

    content_type: str
    body: bytes | bytearray


class RequestError(SampleError):
    """A failed request, and whether a retry may help."""

    def __init__(self, kind: str, message: str, *, is_temporary: bool = False, retry_after: str = "") -> None:
        super().__init__("model", kind, message)
        self.is_temporary = is_temporary
        self.retry_after = retry_after


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request in flight."""

    body: bytes
    is_sent: bool = False
    """True while it is being sent or answered; False while queued or between attempts."""
    future: Future[Reply] = field(default_factory=Future)


class HttpClient:
    """Sends requests to one address from its own thread."""

    def __init__(self, address: str, key: str, settings: HttpSettings) -> None:
        self._library = http_library()
        self._url, self._settings = endpoint(address), settings
        self._client = open_client(address, key, seconds=settings.timeout, connections=settings.concurrency)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def submit(self, body: bytes) -> PendingRequest:
        """Send a request as soon as a slot is free. The future returns the reply or raises `RequestError`; it can be
        cancelled."""
        asking = PendingRequest(body)
        asking.future = asyncio.run_coroutine_threadsafe(self._ask(asking), self._loop)
        return asking

    def close(self) -> None:
        """Drop requests in flight and stop the thread."""
        with suppress(TimeoutError):  # a pending DNS lookup cannot be cancelled; its thread ends with the process
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _ask(self, asking: PendingRequest) -> Reply:
        draws = random.Random(asking.body)  # noqa: S311 (pauses of one request are the same in every run)
        for number in range(1, self._settings.tries + 1):
            try:
                async with self._slots:
                    asking.is_sent = True
                    try:
                        return await self._once(asking.body)
                    finally:
                        asking.is_sent = False
            except RequestError as error:
                if not error.is_temporary or number == self._settings.tries:
                    raise _counted(error, number) from error
                seconds = pause_seconds(self._settings.pause, number, draws.random(), error.retry_after)
            await asyncio.sleep(seconds)
        raise AssertionError("a last try returns or raises")

    async def _once(self, body: bytes) -> Reply:
        """One attempt; any failure becomes a `RequestError`."""
        library = self._library
        try:
            async with asyncio.timeout(self._settings.timeout):
                async with self._client.stream("POST", self._url, content=body, headers=_JSON) as response:
                    return await self._reply(response)
        except RequestError:
            raise
        except TimeoutError as error:
            raise RequestError("timeout", f"no complete response within {self._settings.timeout:g} s") from error
        except (library.ConnectError, library.ConnectTimeout, library.ProxyError) as error:
            raise RequestError("unreachable", f"no connection: {error!r}", is_temporary=True) from error
        except library.ProtocolError as error:
            raise RequestError("bad_http", f"the response is not complete HTTP: {error}", is_temporary=True) from error
        except library.TransportError as error:
            raise RequestError("connection_broken", f"the connection broke: {error!r}", is_temporary=True) from error
        except Exception as error:  # a server can make the library fail anywhere: that concerns only this sample
            raise RequestError("raised", f"{type(error).__name__}: {error}") from error

    async def _reply(self, response: Any) -> Reply:
        status, headers = response.status_code, response.headers
        if 300 <= status < 400:
            where = headers.get("location", "no address")
            raise RequestError("redirect", f"the server redirects to another address ({status}), not followed: {where}")
        if status != 200:
            text = (await _beginning(response)).decode("utf-8", "replace")
            is_busy = status == 429 or status >= 500
            raise RequestError(f"http_{status}", text, is_temporary=is_busy, retry_after=headers.get("retry-after", ""))
        packing = headers.get("content-encoding", "").strip().lower()
        body = await read_body(response.aiter_raw(), packing, self._settings.answer_bytes or ANSWER_BYTES)
        return Reply(headers.get("content-type", ""), body)


def pause_seconds(first: float, number: int, draw: float, retry_after: str = "") -> float:
    """Pause after attempt `number`: exponential with jitter `draw` (0 to 1), at least what the server requests,
    capped."""
    grown: float = first * 2.0 ** min(number - 1, 32) * (0.5 + draw / 2)
    return min(LONGEST_PAUSE, max(grown, _asked_seconds(retry_after)))


def _asked_seconds(retry_after: str) -> float:
    """Of a header Retry-After, which is a number of seconds or a date; 0 for anything else."""
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    left: float = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, left)


async def read_body(chunks: AsyncIterator[bytes], packing: str, most: int) -> bytearray:
    """The body, decompressed while reading; never holds more than the limit, compressed or not."""
    unpack, is_whole = _unpacker(packing)
    body, received = bytearray(), 0
    async for chunk in chunks:
        received += len(chunk)
        body += unpack(chunk, most + 1 - len(body))
        if max(received, len(body)) > most:
            raise RequestError("too_large", f"the response has more than {most:,} bytes")
    if not is_whole():
        raise RequestError("bad_answer", f"the response's {packing} data is truncated, or followed by something else")
    return body


Unpack = Callable[[bytes, int], bytes]


def _unpacker(packing: str) -> tuple[Unpack, Callable[[], bool]]:
    if packing in ("", "identity"):
        return (lambda chunk, most: chunk[:most]), (lambda: True)
    if packing not in ("gzip", "x-gzip", "deflate"):
        raise RequestError("bad_answer", f"the response has a content encoding that was not requested: {packing[:100]}")
    inner = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, as its first bytes say

    def unpack(chunk: bytes, most: int) -> bytes:
        try:
            return inner.decompress(chunk, max(1, most))
        except zlib.error as error:
            raise RequestError("bad_answer", f"the response cannot be decompressed: {error}") from error

    return unpack, lambda: inner.eof and not inner.unused_data


async def _beginning(response: Any) -> bytes:
    """The first bytes of an error response."""
    found = bytearray()
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) >= _ERROR_BYTES:
            break
    return bytes(found[:_ERROR_BYTES])


def _counted(error: RequestError, tries: int) -> RequestError:
    said = str(error) if tries == 1 else f"{error} (tried {tries} times)"
    return RequestError(error.kind, said, is_temporary=error.is_temporary)
