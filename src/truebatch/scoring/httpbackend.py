"""A model behind an OpenAI-compatible address (vLLM, SGLang, llama.cpp, ...) as a backend.

The server batches by itself: the samples of a batch are asked for at the same time, and each fails alone.
"""

from __future__ import annotations

import base64
import io
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from truebatch.errors import ConfigError
from truebatch.scoring.backend import Answer, Asked, Cost, SampleError
from truebatch.scoring.labels import Read
from truebatch.scoring.pictures import open_picture
from truebatch.scoring.readouts import Generate, Head, Readout, as_labels, describe_readout

TOP = 20
"""Most next tokens that servers tell the probabilities of."""
_TRIES = 3


@dataclass(frozen=True, slots=True)
class HttpBackend:
    """Asks a server. What it answers for a sample is its own matter: levels of sameness cannot be promised here."""

    address: str
    """Such as http://localhost:8000/v1"""
    served: str
    readout: Readout
    timeout: float = 600.0
    at_once: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.readout, Head):
            raise ConfigError("a server has no heads to read", seen="Head()", do="use labels or generate")
        if isinstance(self.readout, Generate) and self.readout.settings.beams > 1:
            raise ConfigError("servers have no beam search", seen=f"beams={self.readout.settings.beams}", do="beams=1")

    def describe(self) -> Mapping[str, Any]:
        """The name of the model there; its weights and version are not known here."""
        return {"backend": "http", "model": self.served, "readout": describe_readout(self.readout)}

    def cost(self, sample: Asked, /) -> Cost:
        """An estimate, to order batches: the server counts for itself."""
        words = json.dumps([dict(m) for m in sample.messages]) + sample.system + sample.user
        new = self.readout.settings.max_new_tokens if isinstance(self.readout, Generate) else 1
        return Cost(tokens=1 + len(words) // 4 + 256 * len(sample.images), new_tokens=new)

    def prepare(self, sample: Asked, /) -> dict[str, Any]:
        """The request for a sample, images inside."""
        messages = [dict(message) for message in sample.messages]
        if not messages:
            messages = [{"role": "system", "content": sample.system}] if sample.system else []
            messages.append({"role": "user", "content": sample.user})
        request = {"model": self.served, "messages": _placed(messages, [_url(i) for i in sample.images], sample.id)}
        return {**request, **self._wanted(), **sample.options}  # what it does not know, the server refuses

    def judge(self, prepared: Sequence[dict[str, Any]], /) -> Sequence[Answer | SampleError]:
        """All requests at once."""
        with ThreadPoolExecutor(min(self.at_once, len(prepared))) as pool:
            return list(pool.map(self._one, prepared))

    def close(self) -> None:
        """Nothing is held."""

    def _wanted(self) -> dict[str, Any]:
        if not isinstance(self.readout, Generate):
            return {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": TOP}
        settings = self.readout.settings
        wanted = {name: value for name, value in asdict(settings).items() if name in ("temperature", "top_p", "seed")}
        stop = {"stop": list(settings.stop)} if settings.stop else {}
        return {**wanted, "max_tokens": settings.max_new_tokens, **stop}

    def _one(self, request: dict[str, Any]) -> Answer | SampleError:
        try:
            found = self._post(request)
            choice, tokens = found["choices"][0], int(found.get("usage", {}).get("total_tokens", 0))
            if isinstance(self.readout, Generate):
                ended = str(choice.get("finish_reason"))
                return self.readout.answer(choice["message"]["content"] or "", ended, tokens)
            return self._read(choice["logprobs"]["content"][0]["top_logprobs"], tokens)
        except SampleError as error:
            return error
        except ConfigError:  # which is a ValueError too
            raise
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return SampleError("model", "bad_answer", f"the server's answer has another form: {error!r}")

    def _read(self, top: Sequence[Mapping[str, Any]], tokens: int) -> Answer | SampleError:
        """Labels among the likeliest next tokens. One that is not among them has at most the least of their chances."""
        labels = as_labels(self.readout)
        assert labels is not None
        chances = {str(one["token"]): math.exp(one["logprob"]) for one in top}
        least = min(chances.values(), default=0.0)
        found = [chances.get(label, 0.0) for label in labels.values]
        missing = [label for label in labels.values if label not in chances]
        if len(missing) == len(found):
            return SampleError(
                "model", "no_mass", f"no label is among the {len(top)} likeliest tokens", {"top": chances}
            )
        answer = labels.answer(Read(tuple(found), sum(found)), tokens)
        if isinstance(answer, SampleError) or not missing:
            return answer
        return Answer(score=answer.score, output={**answer.output, "missing": missing, "at_most": least}, tokens=tokens)

    def _post(self, request: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(request).encode()
        call = urllib.request.Request(  # noqa: S310 (the address is the user's own)
            self.address.rstrip("/") + "/chat/completions", body, {"Content-Type": "application/json"}
        )
        for attempt in range(_TRIES):
            try:
                with urllib.request.urlopen(call, timeout=self.timeout) as answer:  # noqa: S310
                    found: dict[str, Any] = json.load(answer)
                    return found
            except urllib.error.HTTPError as error:
                text = error.read().decode("utf-8", "replace")[:500]
                if error.code in (401, 403, 404):
                    raise ConfigError(
                        f"the server refuses every request ({error.code})",
                        seen=text,
                        do="check the address and the model",
                    ) from error
                if error.code < 500 and error.code != 429:
                    raise SampleError("model", f"http_{error.code}", text) from error
                if attempt == _TRIES - 1:
                    raise SampleError("model", f"http_{error.code}", text) from error
            except TimeoutError as error:
                raise SampleError("model", "timeout", f"no answer in {self.timeout:g} s") from error
            except OSError as error:  # the server is not there, or the line broke: the next try may reach it
                if attempt == _TRIES - 1:
                    raise _unreachable(self.address, error) from error
        raise AssertionError("a last try returns or raises")


def _unreachable(address: str, error: OSError) -> ConfigError:
    return ConfigError(
        "the server cannot be reached; what was judged stays",
        seen=f"{address}: {error}",
        do="start it, or correct the address, then give the same command again: it goes on",
    )


def _placed(messages: list[dict[str, Any]], urls: list[str], name: str) -> list[dict[str, Any]]:
    """Images at their places in the messages, the rest before the first words of the user."""
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
            raise SampleError("prepare", "wrong_images", f"{name} has images and no message of a user")
        words = user["content"]
        rest = [{"type": "text", "text": words}] if isinstance(words, str) else words
        user["content"] = [*(_part(url) for url in left), *rest]
    return out


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _url(image: Any) -> str:
    """The image as a data address, decoded once here so that a broken one never reaches the server."""
    file = io.BytesIO()
    open_picture(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
