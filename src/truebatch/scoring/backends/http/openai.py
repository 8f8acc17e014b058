"""A model behind an OpenAI-compatible address (vLLM, SGLang, llama.cpp, ...) as a backend.

The server does the batching: a number of samples are requested at a time, and each is done when answered.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from truebatch.errors import ConfigError
from truebatch.io.http import http_library
from truebatch.io.server_address import KEY_ENV, check_key
from truebatch.scoring.backends.http.address import endpoint
from truebatch.scoring.backends.http.chat_response import read_chances, read_choice, read_text
from truebatch.scoring.backends.http.client import (
    ANSWER_BYTES,
    TOKEN_BYTES,
    HttpClient,
    HttpSettings,
    Reply,
)
from truebatch.scoring.backends.http.in_flight import InFlight
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.inputs.images import open_image
from truebatch.scoring.readouts import Generate, Head, Readout, as_labels, describe_readout
from truebatch.scoring.readouts.label_trie import LabelReading

TOP = 20
"""Maximum number of next tokens for which servers return probabilities."""
_WAITING = 8
"""Requests queued for a free slot, so that no slot stays idle."""
_MESSAGE = 500
_SHORTEST_SECRET = 8
"""Minimum length of a key to look for in responses: servers without keys are given `EMPTY` and the like."""
_DOUBTED = ("http_401", "http_403", "http_404", "unreachable")
"""Errors blamed on the server if every sample gets them, and on the sample if later ones succeed."""
_Tag = TypeVar("_Tag")


@dataclass(eq=False, slots=True)
class HttpBackend:
    """Backend for a server. Its results are its own: no level of reproducibility can be guaranteed here."""

    address: str
    """Such as http://localhost:8000/v1"""
    served: str
    readout: Readout
    settings: HttpSettings = field(default_factory=HttpSettings)
    key: str = field(default="", repr=False)
    """Sent to the address as a bearer token, and never saved."""
    _client: HttpClient | None = field(default=None, init=False, repr=False)
    _has_answered: bool = field(default=False, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        endpoint(self.address)
        check_key(self.address, self.key)
        http_library()
        if isinstance(self.readout, Head):
            raise ConfigError("a server cannot read a model's head", seen="Head()", do="use labels or generate")
        if isinstance(self.readout, Generate) and self.readout.settings.beams > 1:
            raise ConfigError(
                "servers do not support beam search", seen=f"beams={self.readout.settings.beams}", do="beams=1"
            )
        if not isinstance(self.readout, Generate) and self.readout.prefix:
            seen = f"prefix={self.readout.prefix!r}"
            raise ConfigError("a server does not support an answer prefix", seen=seen, do="omit the prefix")

    def describe(self) -> Mapping[str, Any]:
        """The name of the model there; its weights and version are unknown here."""
        return {"backend": "http", "model": self.served, "readout": describe_readout(self.readout)}

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """An estimate, to order batches: the server counts for itself."""
        words = json.dumps([dict(m) for m in sample.messages]) + sample.system + sample.user
        new = self.readout.settings.max_new_tokens if isinstance(self.readout, Generate) else 1
        return Cost(tokens=1 + len(words) // 4 + 256 * len(sample.images), new_tokens=new)

    def prepare(self, sample: ScoreRequest, /) -> dict[str, Any]:
        """The request for a sample, images inside."""
        messages = [dict(message) for message in sample.messages]
        if not messages:
            messages = [{"role": "system", "content": sample.system}] if sample.system else []
            messages.append({"role": "user", "content": sample.user})
        request = {"model": self.served, "messages": _placed(messages, [_url(i) for i in sample.images], sample.id)}
        return {**request, **self._wanted(), **sample.options}  # the server rejects what it does not support

    def judge(self, prepared: Sequence[dict[str, Any]], /) -> Sequence[ScoreResponse | SampleError]:
        """Responses to all requests, in order; see `as_completed`."""
        found = dict(self.as_completed(enumerate(prepared), lambda: False))
        return [found[number] for number in range(len(prepared))]

    def as_completed(
        self, prepared: Iterable[tuple[_Tag, dict[str, Any] | SampleError]], is_stopped: Callable[[], bool]
    ) -> Iterator[tuple[_Tag, ScoreResponse | SampleError]]:
        """Yield every response as soon as it arrives; samples that could not be prepared come back at once.

        Once `is_stopped`, nothing more is sent and requests in flight get a short time: responses that arrive are
        yielded, the rest left out. A server that rejects every request raises `ConfigError`, after the received
        responses were yielded.
        """
        with self._lock:
            client = self._client = self._client or HttpClient(self.address, self.key, self._limited())
        most = self.settings.concurrency + _WAITING
        flight: InFlight[_Tag] = InFlight(client, most, is_stopped)
        doubted: list[tuple[_Tag, SampleError]] = []
        try:
            for tag, found in flight.run((tag, _packed(one)) for tag, one in prepared):
                if isinstance(found, Reply):
                    self._has_answered = True
                    yield from doubted
                    doubted.clear()
                    yield tag, self._answer(found)
                elif found.kind in _DOUBTED:
                    doubted.append((tag, self._unshown(found)))
                    if len(doubted) >= most:
                        flight.end()
                else:
                    yield tag, self._unshown(found)
        finally:
            flight.cancel()
        if doubted and not is_stopped():
            yield from self._settled(doubted, is_sure=len(doubted) >= most)

    def close(self) -> None:
        """Drop requests in flight."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _limited(self) -> HttpSettings:
        """The settings, with a default byte limit that fits the request."""
        new = self.readout.settings.max_new_tokens if isinstance(self.readout, Generate) else 1
        return replace(self.settings, answer_bytes=self.settings.answer_bytes or ANSWER_BYTES + TOKEN_BYTES * new)

    def _wanted(self) -> dict[str, Any]:
        if not isinstance(self.readout, Generate):
            return {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": TOP}
        settings = self.readout.settings
        wanted = {name: value for name, value in asdict(settings).items() if name in ("temperature", "top_p", "seed")}
        stop = {"stop": list(settings.stop)} if settings.stop else {}
        return {**wanted, "max_tokens": settings.max_new_tokens, **stop, **_structure(self.readout)}

    def _settled(
        self, doubted: Sequence[tuple[_Tag, SampleError]], *, is_sure: bool
    ) -> Iterator[tuple[_Tag, SampleError]]:
        """No request succeeded after these: the server is at fault, unless it answered before and is still up."""
        error = doubted[-1][1]
        if self._has_answered and not is_sure and error.kind != "unreachable":
            yield from doubted
            return
        if error.kind == "unreachable":
            raise ConfigError(
                "the server cannot be reached; finished results are kept",
                seen=f"{self.address}: {error}",
                do="start it, or correct the address, then run the same command again: it resumes",
            )
        do = (
            "check the address and the model"
            if error.kind == "http_404"
            else f"check the key ({KEY_ENV}, or --key-env NAME) and its permissions; then run the same command again"
        )
        code = error.kind.removeprefix("http_")
        raise ConfigError(f"the server rejects every request ({code})", seen=str(error), do=do)

    def _answer(self, reply: Reply) -> ScoreResponse | SampleError:
        if self._is_secret and self.key.encode() in reply.body:
            return _KEY_IN_ANSWER
        try:
            choice = read_choice(reply.body, reply.content_type)
            if isinstance(self.readout, Generate):
                answer = self.readout.answer(*read_text(choice), choice.tokens)
            else:
                answer = self._read(read_chances(choice), choice.tokens)
        except SampleError as error:
            return self._unshown(error)
        return _KEY_IN_ANSWER if self._is_secret and _holds(answer.output, self.key) else answer

    @property
    def _is_secret(self) -> bool:
        return len(self.key) >= _SHORTEST_SECRET

    def _unshown(self, error: SampleError) -> SampleError:
        """The error without the key, which a server may send back."""
        said = str(error).replace(self.key, "***") if self.key else str(error)
        return SampleError(error.stage, error.kind, said[:_MESSAGE], error.output)

    def _read(self, chances: Mapping[str, float], tokens: int) -> ScoreResponse | SampleError:
        """Read labels from the likeliest next tokens. A label not among them is at most as probable as the least likely
        one."""
        labels = as_labels(self.readout)
        assert labels is not None
        least = min(chances.values())
        found = [chances.get(label, 0.0) for label in labels.values]
        missing = [label for label in labels.values if label not in chances]
        if len(missing) == len(found):
            return SampleError(
                "model", "no_mass", f"no label is among the {len(chances)} likeliest tokens", {"top": dict(chances)}
            )
        answer = labels.answer(LabelReading(tuple(found), sum(found)), tokens)
        if isinstance(answer, SampleError) or not missing:
            return answer
        return ScoreResponse(
            score=answer.score, output={**answer.output, "missing": missing, "at_most": least}, tokens=tokens
        )


_KEY_IN_ANSWER = SampleError("model", "key_in_answer", "the server's response contains the API key; it is not saved")


def _structure(readout: Generate) -> dict[str, Any]:
    """What a request says about the form of the answer."""
    if not readout.structured:
        return {}
    if readout.structured == "guided_choice":
        return {"guided_choice": list(readout.choices())}
    values = [json.loads(one)["score"] for one in readout.choices()]
    schema = {
        "type": "object", "properties": {"score": {"enum": values}}, "required": ["score"],
        "additionalProperties": False,
    }  # fmt: skip
    if readout.structured == "guided_json":
        return {"guided_json": schema}
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "score", "strict": True, "schema": schema}}
    }


def _packed(request: dict[str, Any] | SampleError) -> bytes | SampleError:
    try:
        return request if isinstance(request, SampleError) else json.dumps(request, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # from options that exist only in Python
        return SampleError("prepare", "wrong_option", f"the request cannot be written as JSON: {error}")


def _holds(value: Any, key: str) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(one, key) for pair in value.items() for one in pair)
    return isinstance(value, str) and key in value


def _placed(messages: list[dict[str, Any]], urls: list[str], name: str) -> list[dict[str, Any]]:
    """Insert images at their placeholders in the messages, the rest before the user's first text."""
    left = list(urls)
    out = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            try:
                content = [_part(left.pop(0)) if part.get("type") == "image" else part for part in content]
            except IndexError as error:
                raise SampleError("prepare", "wrong_images", f"{name} names more images than it has") from error
        out.append({**message, "content": content})
    if left:
        user = next((one for one in out if one["role"] == "user"), None)
        if user is None:
            raise SampleError("prepare", "wrong_images", f"{name} has images but no user message")
        words = user["content"]
        rest = [{"type": "text", "text": words}] if isinstance(words, str) else words
        user["content"] = [*(_part(url) for url in left), *rest]
    return out


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _url(image: Any) -> str:
    """The image as a data URL, decoded once here so that a broken one never reaches the server."""
    file = io.BytesIO()
    open_image(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
