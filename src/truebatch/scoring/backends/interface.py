"""What judges: a thing that says what a sample will cost, prepares it, and answers for many prepared ones at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from truebatch.scoring.store.outcome import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """One sample as the user gave it."""

    id: str
    """Its own name, or its place in the data; it is in every message and in the export."""
    system: str = ""
    user: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    """A whole conversation instead of `system` and `user`."""
    images: Sequence[Any] = ()
    """Paths, bytes or PIL images, in the order in which the prompt names them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What changes the answer of this sample alone."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Carried to the export; no part of the key."""

    def content(self) -> dict[str, Any]:
        """What the key is made of, beside the images."""
        words = (
            {"messages": [dict(m) for m in self.messages]}
            if self.messages
            else {"system": self.system, "user": self.user}
        )
        return {**words, "options": dict(self.options)} if self.options else words


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a sample will take, known before a pixel is decoded."""

    tokens: int
    """Of the prompt, image tokens counted."""
    new_tokens: int = 0
    """That may be generated."""
    patches: int = 0
    """Of the vision tower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResponse:
    """What a backend says of one sample."""

    score: float | None
    output: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0


class SampleError(Exception):
    """A sample that cannot be judged: a record of its own, and no concern of its neighbours."""

    def __init__(self, stage: Stage, kind: str, message: str, output: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.stage: Stage = stage
        self.kind = kind
        self.output = dict(output or {})


class Backend(Protocol):
    """A model with a readout, somewhere: in this process, in another one, behind an address, or in a script."""

    def describe(self) -> Mapping[str, Any]:
        """Everything an answer depends on beside the sample, as plain values for the manifest."""

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """What a sample will take, from headers and lengths; what cannot be read raises `SampleError`."""

    def prepare(self, sample: ScoreRequest, /) -> Any:
        """The sample ready for the model; runs ahead, in threads. What is wrong with it raises `SampleError`."""

    def judge(self, prepared: Sequence[Any], /) -> Sequence[ScoreResponse | SampleError]:
        """Answers for prepared samples, in order, one each."""

    def close(self) -> None:
        """Give back what it holds; called once, also after an error."""
