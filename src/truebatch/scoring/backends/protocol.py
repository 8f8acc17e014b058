"""The JSON-lines protocol between a run and its worker processes; nothing is pickled."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.store.outcome import Outcome


def encode(value: Mapping[str, Any]) -> bytes:
    """One line. NaN scores are sent as they are: the receiver records a failure."""
    return json.dumps(value).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The value of a line."""
    found: dict[str, Any] = json.loads(line)
    return found


def pack_request(sample: ScoreRequest) -> dict[str, Any]:
    """A sample; images are sent as path or bytes, PIL images as PNG."""
    names = ("id", "system", "user", "options", "meta")
    plain = {name: getattr(sample, name) for name in names}
    messages = [dict(message) for message in sample.messages]
    return {**plain, "messages": messages, "images": [_pack_image(image) for image in sample.images]}


def unpack_request(value: Mapping[str, Any]) -> ScoreRequest:
    """The sample again."""
    images = [one if isinstance(one, str) else base64.b64decode(one["bytes"]) for one in value["images"]]
    return ScoreRequest(**{**value, "images": tuple(images), "messages": tuple(value["messages"])})


def pack_response(answer: ScoreResponse | SampleError) -> dict[str, Any]:
    """A result, or why there is none."""
    if isinstance(answer, SampleError):
        return {"stage": answer.stage, "kind": answer.kind, "message": str(answer), "output": answer.output}
    return {"score": answer.score, "output": dict(answer.output), "tokens": answer.tokens}


def unpack_response(value: Mapping[str, Any]) -> ScoreResponse | SampleError:
    """The answer again."""
    if "stage" in value:
        return SampleError(value["stage"], value["kind"], value["message"], value["output"])
    return ScoreResponse(score=value["score"], output=value["output"], tokens=value["tokens"])


def pack_cost(cost: Cost | SampleError) -> dict[str, Any]:
    """A cost, or why there is none."""
    if isinstance(cost, SampleError):
        return pack_response(cost)
    return {"tokens": cost.tokens, "new_tokens": cost.new_tokens, "patches": cost.patches}


def unpack_cost(value: Mapping[str, Any]) -> Cost | SampleError:
    """The cost again."""
    if "stage" in value:
        return SampleError(value["stage"], value["kind"], value["message"], value["output"])
    return Cost(**value)


def pack_outcome(outcome: Outcome) -> dict[str, Any]:
    """The outcome of a sample."""
    return {**asdict(outcome), "output": dict(outcome.output)}


def unpack_outcome(value: Mapping[str, Any]) -> Outcome:
    """The outcome again."""
    return Outcome(**value)


def _pack_image(image: Any) -> Any:
    if isinstance(image, str):
        return image
    if not isinstance(image, bytes | bytearray | memoryview):
        file = io.BytesIO()
        image.save(file, "PNG")
        image = file.getvalue()
    return {"bytes": base64.b64encode(image).decode()}
