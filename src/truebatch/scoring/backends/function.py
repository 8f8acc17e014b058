"""Any function from samples to numbers as a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse


@dataclass(frozen=True, slots=True)
class FunctionBackend:
    """A backend from a function that takes a list of samples and returns a number for each; its name is its
    fingerprint."""

    function: Callable[[Sequence[ScoreRequest]], Sequence[Any]]
    name: str = ""

    def describe(self) -> Mapping[str, Any]:
        """The function's name; what it computes with is up to its owner."""
        own = getattr(self.function, "__qualname__", type(self.function).__name__)
        return {"backend": "function", "model": self.name or own}

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """One token per four characters, close enough to balance batches."""
        words = "".join(str(m.get("content", "")) for m in sample.messages) + sample.system + sample.user
        return Cost(tokens=1 + len(words) // 4 + 256 * len(sample.images))

    def prepare(self, sample: ScoreRequest, /) -> ScoreRequest:
        """The sample itself."""
        return sample

    def judge(self, prepared: Sequence[ScoreRequest], /) -> Sequence[ScoreResponse | SampleError]:
        """The function's results; None is a failure, never a number."""
        return [self._answer(value) for value in self.function(prepared)]

    def close(self) -> None:
        """Nothing to release."""

    @staticmethod
    def _answer(value: Any) -> ScoreResponse | SampleError:
        if isinstance(value, ScoreResponse | SampleError):
            return value
        if value is None:
            return SampleError("model", "no_score", "the function returned None")
        return ScoreResponse(score=float(value))
