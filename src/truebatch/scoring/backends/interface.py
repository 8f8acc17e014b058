"""The backend interface: estimate a sample's cost, prepare it, and score many prepared samples at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from truebatch.scoring.store.outcome import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """One sample as given by the user."""

    id: str
    """The user's id, or the position in the data; used in messages and the export."""
    system: str = ""
    user: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    """A whole conversation instead of `system` and `user`."""
    images: Sequence[Any] = ()
    """Paths, bytes or PIL images, in the order in which the prompt refers to them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for this sample alone."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Copied to the export; not part of the key."""

    def content(self) -> dict[str, Any]:
        """What the key is computed from, besides the images."""
        words = (
            {"messages": [dict(m) for m in self.messages]}
            if self.messages
            else {"system": self.system, "user": self.user}
        )
        return {**words, "options": dict(self.options)} if self.options else words


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Estimated cost of a sample, known before any pixel is decoded."""

    tokens: int
    """Prompt tokens, including image tokens."""
    new_tokens: int = 0
    """Maximum number of new tokens."""
    patches: int = 0
    """Patches for the vision tower."""
    group: str = ""
    """Samples of different groups share no batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResponse:
    """A backend's result for one sample."""

    score: float | None
    output: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0


class SampleError(Exception):
    """A sample that cannot be scored: recorded as a failure, without affecting other samples."""

    def __init__(self, stage: Stage, kind: str, message: str, output: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.stage: Stage = stage
        self.kind = kind
        self.output = dict(output or {})


class Backend(Protocol):
    """A model with a readout: in this process, in another one, on a server, or scripted."""

    def describe(self) -> Mapping[str, Any]:
        """Everything a result depends on besides the sample, as plain values for the manifest."""

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """Estimate a sample's cost from headers and lengths; an unreadable sample raises `SampleError`."""

    def prepare(self, sample: ScoreRequest, /) -> Any:
        """Prepare a sample for the model; runs ahead in threads. A faulty sample raises `SampleError`."""

    def judge(self, prepared: Sequence[Any], /) -> Sequence[ScoreResponse | SampleError]:
        """One result per prepared sample, in order."""

    def close(self) -> None:
        """Release resources; called once, also after an error."""


def slower_ways(backend: Backend) -> list[str]:
    """Quick ways that a backend was found not to allow, each with the reason; of most there are none to try."""
    return list(getattr(backend, "slower_ways", list)())
