"""The log-probabilities that a server gives the tokens of a prompt: OpenAI-compatible completions, of vLLM and others.

token ids -> POST .../completions -> prompt_logprobs (vLLM), or echo with logprobs (others) -> one number a token

A key comes from the environment alone; no redirect is followed; every request has a deadline and a limit of bytes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.io.http import http_library, open_client
from truebatch.io.server_address import KEY_ENV, check_address, check_key

_AT_ONCE = 8
_NAMED_ID = re.compile(r"token_id:(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """An address of completions, such as http://localhost:8000/v1.

    >>> from truebatch.verification.engines.server_logprobs import Server
    >>> Server(address="http://localhost:8000/v1", model="tiny").address
    'http://localhost:8000/v1'
    """

    address: str
    model: str | None = None
    """The name it serves; None: the only one that it lists."""
    dtype: str | None = None
    """What it computes in, such as bfloat16; None: the dtype of the model it is compared with."""
    timeout: float = 120.0
    """Seconds for one request as a whole."""
    answer_bytes: int = 64 << 20
    """Most bytes of one answer."""

    def __post_init__(self) -> None:
        check_address(self.address)
        if not (0 < self.timeout < math.inf and self.answer_bytes > 0):
            raise ConfigError(
                "the limits of a server must be above 0",
                seen=f"timeout={self.timeout}, answer_bytes={self.answer_bytes}",
                do="leave them out, or give positive numbers",
            )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What a server says of one prompt."""

    logprobs: tuple[float | None, ...]
    """Of every token it read; None for the first, which has nothing before it."""
    texts: tuple[str, ...]
    """Of the tokens; empty texts where it gives none."""
    ids: tuple[int | None, ...]
    """Of the tokens; None where it gives none."""


class _RefusedError(Exception):
    """The server does not know this form of request."""


def prompt_logprobs(server: Server, prompts: Sequence[Sequence[int] | str]) -> list[PromptLogprobs]:
    """Ask for every prompt, token ids or a text, a few at a time."""
    with ThreadPoolExecutor(1) as thread:  # a notebook has a loop of its own in this thread
        return thread.submit(asyncio.run, _ask_all(server, prompts)).result()


async def _ask_all(server: Server, prompts: Sequence[Sequence[int] | str]) -> list[PromptLogprobs]:
    library = http_library()
    async with _client(server) as client:
        asking = _Asking(library, client, server)
        name = server.model or await asking.only_model()
        first = [await asking.ask(name, prompts[0])] if prompts else []  # finds the form that the server knows
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(prompt: Sequence[int] | str) -> PromptLogprobs:
            async with places:
                return await asking.ask(name, prompt)

        return [*first, *await asyncio.gather(*map(one, prompts[1:]))]


def _client(server: Server) -> Any:
    key = os.environ.get(KEY_ENV, "").strip()
    check_key(server.address, key)
    return open_client(server.address, key, seconds=server.timeout)


class _Asking:
    """One client and the form of request that its server was found to know."""

    def __init__(self, library: Any, client: Any, server: Server) -> None:
        self._library, self._client, self._server = library, client, server
        self._forms = list(_FORMS)

    async def only_model(self) -> str:
        """The name that the server lists."""
        listed = (await self._json("GET", "models", None)).get("data")
        names = [str(one.get("id")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        if len(names) != 1:
            raise ConfigError(
                "the name of the served model is needed",
                seen=f"the server lists {', '.join(names[:8]) or 'no model'}",
                do="name one: --served-model NAME",
            )
        return names[0]

    async def ask(self, model: str, prompt: Sequence[int] | str) -> PromptLogprobs:
        """The log-probabilities of one prompt, in the first form that the server answers."""
        refusals: list[str] = []
        given = prompt if isinstance(prompt, str) else [int(i) for i in prompt]
        for form in list(self._forms):
            request = {"model": model, "prompt": given, "temperature": 0, **form}
            try:
                answer = await self._json("POST", "completions", request)
                found = _read(answer, None if isinstance(prompt, str) else len(prompt), int(form["max_tokens"]))
            except _RefusedError as refusal:
                refusals.append(str(refusal))
                continue
            self._forms = [form]
            return found
        raise DataError(
            "the server gives no log-probabilities of a prompt",
            seen="; ".join(dict.fromkeys(refusals))[:400],
            do="use one that answers completions with prompt_logprobs (vLLM), or with echo and logprobs",
        )

    async def _json(self, method: str, path: str, request: Mapping[str, Any] | None) -> dict[str, Any]:
        url = f"{self._server.address.rstrip('/')}/{path}"
        try:
            async with asyncio.timeout(self._server.timeout):
                status, body = await self._fetch(method, url, request)
        except TimeoutError as error:
            raise DataError(
                "the server gave no whole answer in time",
                seen=f"{url}: {self._server.timeout:g} s",
                do="look at the server; verify with fewer or shorter samples",
            ) from error
        except self._library.TransportError as error:
            raise ConfigError(
                "the server cannot be reached", seen=f"{url}: {error!r}", do="start it, or correct the address"
            ) from error
        return _checked(url, status, body)

    async def _fetch(self, method: str, url: str, request: Mapping[str, Any] | None) -> tuple[int, bytes]:
        body = bytearray()
        async with self._client.stream(method, url, json=request) as response:
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > self._server.answer_bytes:
                    raise DataError(
                        "the server's answer is too large",
                        seen=f"{url}: more than {self._server.answer_bytes:,} bytes",
                        do="look at what answers there",
                    )
            return response.status_code, bytes(body)


_FORMS: tuple[dict[str, Any], ...] = (
    {"prompt_logprobs": 0, "max_tokens": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"echo": True, "logprobs": 1, "max_tokens": 1},
)
"""vLLM and what is made like it; then the echo of OpenAI's completions, without and with a token of its own."""


def _checked(url: str, status: int, body: bytes) -> dict[str, Any]:
    text = body[:400].decode("utf-8", "replace")
    if status in (400, 422, 501):
        raise _RefusedError(f"{status}: {text}")
    if status != 200:
        raise ConfigError(
            f"the server refuses the request ({status})",
            seen=f"{url}: {text}",
            do="check the address, the served model's name and the key; redirects are not followed",
        )
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError("the server's answer is no JSON", seen=text, do="check the address") from error
    if not isinstance(found, dict):
        raise DataError("the server's answer has another form", seen=text, do="check the address")
    return found


def _read(answer: Mapping[str, Any], sent: int | None, new: int) -> PromptLogprobs:
    """The numbers of the prompt, in whichever of the two forms they came."""
    try:
        choice = answer["choices"][0]
        listed = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
        if isinstance(listed, list):
            return _from_entries(listed)
        echoed = choice.get("logprobs")
        if isinstance(echoed, Mapping) and isinstance(echoed.get("token_logprobs"), list):
            return _from_echo(echoed, answer.get("usage"), sent, new)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _RefusedError(f"an answer of another form: {error!r}") from error
    raise _RefusedError("an answer without log-probabilities of the prompt")


def _from_entries(listed: Sequence[Any]) -> PromptLogprobs:
    """vLLM: null, then for each token a table of ids; the prompt's own token is its first entry."""
    values: list[float | None] = []
    texts: list[str] = []
    ids: list[int | None] = []
    for entry in listed:
        if entry is None:
            values, texts, ids = [*values, None], [*texts, ""], [*ids, None]
            continue
        token, said = next(iter(entry.items()))
        values.append(float(said["logprob"]))
        texts.append(str(said.get("decoded_token") or ""))
        ids.append(int(token))
    return PromptLogprobs(tuple(values), tuple(texts), tuple(ids))


def _from_echo(echoed: Mapping[str, Any], usage: Any, sent: int | None, new: int) -> PromptLogprobs:
    """OpenAI: the tokens of the prompt, then those that were generated, which are cut off."""
    numbers, tokens = echoed["token_logprobs"], [str(t) for t in echoed.get("tokens") or []]
    counted = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    number = int(counted) if isinstance(counted, int) and counted <= len(numbers) else len(numbers) - new
    if sent is not None and number < sent and len(numbers) <= new:
        raise _RefusedError("an answer without an echo of the prompt")
    values = [None if value is None else float(value) for value in numbers[:number]]
    texts = (tokens + [""] * number)[:number]
    named = [_NAMED_ID.fullmatch(text) for text in texts]
    return PromptLogprobs(tuple(values), tuple(texts), tuple(int(n[1]) if n else None for n in named))
