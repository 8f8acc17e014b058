"""What is known of a scored sample: a value, or the stage and the kind of what went wrong; never an invented number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from truebatch.errors import DataError

Status = Literal["ok", "failed"]
Stage = Literal["", "read", "decode", "prepare", "model", "parse"]
"""Where a sample failed: its file, its pixels, its prompt, the forward pass, the answer."""
_MESSAGE = 2000
_STATUSES = get_args(Status)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one sample, or why there is none."""

    key: str
    """Of the sample's content (`scoring.store.content_key`): samples of equal content share it."""
    status: Status
    score: float | None = None
    """A finite number, or None: a text without a number, or a failure."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """What the readout gave beside the score: probabilities, the label mass, the text."""
    tokens: int = 0
    """Tokens read and written for it."""
    stage: Stage = ""
    kind: str = ""
    """A word to count failures by: `truncated_image`, `too_long`, `unparsable`, `out_of_memory`, ..."""
    message: str = ""
    attempts: int = 1

    def __post_init__(self) -> None:
        is_named = bool(self.stage and self.kind)
        if (self.status == "ok" and is_named) or (self.status == "failed" and (not is_named or self.score is not None)):
            raise DataError(
                "a failed sample has a stage and a kind and no score; one that succeeded has no stage",
                seen=f"status={self.status!r}, stage={self.stage!r}, kind={self.kind!r}, score={self.score!r}",
                do="say what happened, and never invent a score",
            )
        if self.status not in _STATUSES:
            raise DataError(
                "a sample is ok or failed", seen=f"status={self.status!r} for {self.key}", do="use one of the two"
            )
        if self.score is not None and not math.isfinite(self.score):
            raise DataError(
                "a score is a finite number",
                seen=f"score={self.score!r} for {self.key}",
                do="record a failure of the stage `model` instead",
            )


def failed(
    key: str, *, stage: Stage, kind: str, message: str, attempts: int = 1, output: Mapping[str, Any] | None = None
) -> Outcome:
    """A failure as a record. A message may come from anywhere: what is not Unicode in it is replaced."""
    plain = message[:_MESSAGE].encode("utf-8", "replace").decode("utf-8")
    return Outcome(
        key=key, status="failed", stage=stage, kind=kind, message=plain, attempts=attempts, output=dict(output or {})
    )
