"""A scripted backend, for testing everything around a model and trying out a pipeline.

A sample's `options` define its behaviour: {"score": 0.5}, {"seconds": 0.1},
{"fail": "raise" | "exit" | "segfault" | "nan" | "too_long" | "memory" | "hang"}
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.inputs.images import image_sizes, open_image

EXIT_CODE = 41


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedBackend:
    """Scores are the lengths of prompts unless a sample's options say something else."""

    name: str = "scripted"
    most_cells: int | None = None
    """A batch with more cells runs out of memory."""
    most_tokens: int = 100_000
    """A longer prompt is rejected."""
    seconds: float = 0.0
    """Seconds per batch."""

    def describe(self) -> Mapping[str, Any]:
        """The name; a script has no weights."""
        return {"backend": "scripted", "model": self.name}

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """One token per character, plus what each image header says."""
        if sample.images:
            image_sizes(sample.images)
        return Cost(tokens=1 + len(sample.user), patches=64 * len(sample.images))

    def prepare(self, sample: ScoreRequest, /) -> ScoreRequest:
        """Decode the images and reject what is too long."""
        for image in sample.images:
            open_image(image)
        if len(sample.user) > self.most_tokens or sample.options.get("fail") == "too_long":
            raise SampleError("prepare", "too_long", f"{sample.id}: {len(sample.user)} tokens")
        return sample

    def judge(self, prepared: Sequence[ScoreRequest], /) -> Sequence[ScoreResponse | SampleError]:
        """Behave as each sample's options say."""
        if self.seconds:
            time.sleep(self.seconds)
        cells = len(prepared) * max(len(one.user) + 1 for one in prepared)
        if self.most_cells is not None and cells > self.most_cells:
            raise MemoryError(f"{cells} cells, at most {self.most_cells}")
        return [_play(one) for one in prepared]

    def close(self) -> None:
        """Nothing to release."""


def _play(sample: ScoreRequest) -> ScoreResponse | SampleError:
    if not sample.options:
        return _answer(sample, float(len(sample.user)))
    way = sample.options.get("fail")
    if seconds := float(sample.options.get("seconds", 0.0)):
        time.sleep(seconds)
    if way == "exit":
        os._exit(EXIT_CODE)
    if way == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if way == "raise":
        raise RuntimeError(f"device-side assert at {sample.id}")
    if way == "memory":
        raise MemoryError(f"{sample.id} does not fit")
    if way == "hang":
        time.sleep(3600)
    score = float("nan") if way == "nan" else float(sample.options.get("score", len(sample.user)))
    return _answer(sample, score)


def _answer(sample: ScoreRequest, score: float) -> ScoreResponse:
    return ScoreResponse(score=score, output={"said": sample.user[:20]}, tokens=len(sample.user) + 1)
