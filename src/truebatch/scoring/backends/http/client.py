"""Requests to one server: many at a time, each with a deadline, a byte limit and some tries, none able to hurt another.

request -> a free place -> connect, send, read, all inside one deadline -> again after a pause, or the reply

Every request has a connection of its own: what a server sends too much would else be read as the answer to the next.
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
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib import import_module
from typing import Any

from truebatch.errors import ConfigError
from truebatch.scoring.backends.http.address import endpoint, is_loopback
from truebatch.scoring.backends.interface import SampleError

ANSWER_BYTES, TOKEN_BYTES = 1 << 18, 64
"""Of an answer, and more for each token it may have: what no honest one needs."""
LONGEST_PAUSE = 60.0
"""Seconds; a server that asks for more is asked again after these."""
_CONNECT_SECONDS = 30.0
_ERROR_BYTES = 1 << 16
"""Read of an answer that is an error: its beginning says why."""
_CLOSE_SECONDS = 5.0
_BEYOND = 1e9
"""More than any setting can mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """How a server is asked; nothing of it changes an answer."""

    timeout: float = 600.0
    """Seconds for one try as a whole: connecting, sending, and the answer to its last byte."""
    concurrency: int = 64
    """Requests under way at a time."""
    tries: int = 5
    """Of one request, where the server is busy or the connection breaks."""
    answer_bytes: int | None = None
    """Most bytes of one answer, also after it is unpacked. None: 262,144, and 64 for every new token."""
    pause: float = 0.5
    """Seconds before the second try; twice as long before each further one."""

    def __post_init__(self) -> None:
        for name, kind in (("timeout", int | float), ("concurrency", int), ("tries", int), ("answer_bytes", int)):
            value = getattr(self, name)
            if name == "answer_bytes" and value is None:
                continue
            if not isinstance(value, kind) or not 0 < value < _BEYOND:
                raise ConfigError(f"{name} is out of range", seen=f"{name}={value!r}", do="give 1 or more")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server said with status 200."""

    content_type: str
    body: bytes | bytearray


class RequestError(SampleError):
    """A request without an answer, and whether another try may bring one."""

    def __init__(self, kind: str, message: str, *, is_temporary: bool = False, retry_after: str = "") -> None:
        super().__init__("model", kind, message)
        self.is_temporary = is_temporary
        self.retry_after = retry_after


@dataclass(eq=False, slots=True)
class Asking:
    """A request on its way."""

    body: bytes
    is_sent: bool = False
    """It is with the server now; False before its turn and in a pause between tries."""
    future: Future[Reply] = field(default_factory=Future)


class HttpClient:
    """Asks one address, in a thread of its own."""

    def __init__(self, address: str, key: str, settings: HttpSettings) -> None:
        self._library = http_library()
        self._url, self._settings = endpoint(address), settings
        is_here = is_loopback(address)
        headers = {
            "Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity",
            "Connection": "close", "User-Agent": "truebatch",
        }  # fmt: skip
        self._client = self._library.AsyncClient(
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            follow_redirects=False,
            trust_env=not is_here,  # a proxy is no way to this machine
            verify=not is_here or self._url.startswith("https:"),  # certificates take a while to load
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=self._library.Limits(max_connections=settings.concurrency, max_keepalive_connections=0),
            timeout=self._library.Timeout(None, connect=min(settings.timeout, _CONNECT_SECONDS)),
        )
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def submit(self, body: bytes) -> Asking:
        """Ask as soon as a place is free. The future gives the reply or raises `RequestError`; it may be cancelled."""
        asking = Asking(body)
        asking.future = asyncio.run_coroutine_threadsafe(self._ask(asking), self._loop)
        return asking

    def close(self) -> None:
        """Drop what is under way and end the thread."""
        with suppress(
            TimeoutError
        ):  # a name that is still looked up cannot be dropped; the thread ends with the process
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

    async def _ask(self, asking: Asking) -> Reply:
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
        """One try, whatever happens in it."""
        library = self._library
        try:
            async with asyncio.timeout(self._settings.timeout):
                async with self._client.stream("POST", self._url, content=body) as response:
                    return await self._reply(response)
        except RequestError:
            raise
        except TimeoutError as error:
            raise RequestError("timeout", f"no whole answer in {self._settings.timeout:g} s") from error
        except (library.ConnectError, library.ConnectTimeout, library.ProxyError) as error:
            raise RequestError("unreachable", f"no connection: {error!r}", is_temporary=True) from error
        except library.ProtocolError as error:
            raise RequestError("bad_http", f"the answer is no whole HTTP: {error}", is_temporary=True) from error
        except library.TransportError as error:
            raise RequestError("connection_broken", f"the connection broke: {error!r}", is_temporary=True) from error
        except Exception as error:  # a server can make a library fail anywhere: that belongs to this sample
            raise RequestError("raised", f"{type(error).__name__}: {error}") from error

    async def _reply(self, response: Any) -> Reply:
        status, headers = response.status_code, response.headers
        if 300 <= status < 400:
            where = headers.get("location", "no address")
            raise RequestError("redirect", f"the server sends on to another address ({status}), not followed: {where}")
        if status != 200:
            text = (await _beginning(response)).decode("utf-8", "replace")
            is_busy = status == 429 or status >= 500
            raise RequestError(f"http_{status}", text, is_temporary=is_busy, retry_after=headers.get("retry-after", ""))
        packing = headers.get("content-encoding", "").strip().lower()
        body = await read_body(response.aiter_raw(), packing, self._settings.answer_bytes or ANSWER_BYTES)
        return Reply(headers.get("content-type", ""), body)


def http_library() -> Any:
    """The client library: httpx2, which newer Hugging Face libraries bring, or httpx, which older ones do."""
    for name in ("httpx2", "httpx"):
        try:
            return import_module(name)
        except ImportError as error:
            missing = error
    raise ConfigError(
        "asking a server needs the package httpx2", seen=str(missing), do="pip install 'truebatch[http]'"
    ) from missing


def pause_seconds(first: float, number: int, draw: float, retry_after: str = "") -> float:
    """Seconds after try `number`: growing, spread by `draw` (0 to 1), at least what the server asks for, up to a limit."""
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
    """The body, unpacked as it comes; nothing beyond the limit is ever held, packed or unpacked."""
    unpack, is_whole = _unpacker(packing)
    body, received = bytearray(), 0
    async for chunk in chunks:
        received += len(chunk)
        body += unpack(chunk, most + 1 - len(body))
        if max(received, len(body)) > most:
            raise RequestError("too_large", f"the answer has more than {most:,} bytes")
    if not is_whole():
        raise RequestError("bad_answer", f"the answer's {packing} is cut off, or followed by something else")
    return body


Unpack = Callable[[bytes, int], bytes]


def _unpacker(packing: str) -> tuple[Unpack, Callable[[], bool]]:
    if packing in ("", "identity"):
        return (lambda chunk, most: chunk[:most]), (lambda: True)
    if packing not in ("gzip", "x-gzip", "deflate"):
        raise RequestError("bad_answer", f"the answer is packed in a way that was not asked for: {packing[:100]}")
    inner = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, as its first bytes say

    def unpack(chunk: bytes, most: int) -> bytes:
        try:
            return inner.decompress(chunk, max(1, most))
        except zlib.error as error:
            raise RequestError("bad_answer", f"the answer cannot be unpacked: {error}") from error

    return unpack, lambda: inner.eof and not inner.unused_data


async def _beginning(response: Any) -> bytes:
    """The first bytes of an answer that is an error."""
    found = bytearray()
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) >= _ERROR_BYTES:
            break
    return bytes(found[:_ERROR_BYTES])


def _counted(error: RequestError, tries: int) -> RequestError:
    said = str(error) if tries == 1 else f"{error} (tried {tries} times)"
    return RequestError(error.kind, said, is_temporary=error.is_temporary)
