"""What the benchmark of judging runs: pairs with pictures, and clocks on the real pipeline."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from truebatch.scoring.backends.transformers import ModelBackend
from truebatch.scoring.inputs import chat_prompt
from truebatch.scoring.store.journal import Journal
from truebatch_systems.vl_reward import stages
from truebatch_systems.vl_reward.data.dataset import EditPair, Wanted, read_benchmark
from truebatch_systems.vl_reward.data.toy_pictures import make_records

PARTS = ("decode", "prepare", "model", "parse", "journal")
Now = Callable[[], float]


def make_pairs(folder: Path, number: int, sides: Sequence[tuple[int, int]]) -> Sequence[EditPair]:
    """A benchmark file of this many pairs, with the embedded benchmark's words and pictures as busy as photographs."""
    draw = np.random.default_rng(0)
    records = make_records(number)
    for at, record in enumerate(records):
        record["src_img_b64"] = base64.b64encode(_picture(draw, sides[at % len(sides)])).decode()
    path = folder / "benchmark.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return read_benchmark(path, Wanted()).pairs


def _picture(draw: np.random.Generator, size: tuple[int, int]) -> bytes:
    from PIL import Image

    width, height = size
    coarse = draw.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(held, "PNG", compress_level=1)
    return held.getvalue()


def turn_around(image: Any, instruction: str, seed: int) -> Any:
    """The edit of this benchmark: what is judged has random weights, so any other picture will do."""
    return image.rotate(180)


@dataclass(slots=True)
class Clock:
    """Seconds by part of the pipeline, over all threads."""

    now: Now = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its seconds added to a part."""

        @wraps(call)
        def run(*args: Any, **named: Any) -> Any:
            began = self.now()
            try:
                return call(*args, **named)
            finally:
                with self.lock:
                    self.seconds[part] += self.now() - began

        return run

    def own(self) -> dict[str, float]:
        """The parts without what is counted inside of another: preparing holds decoding."""
        return {**self.seconds, "prepare": self.seconds["prepare"] - self.seconds["decode"]}


PLACES: tuple[tuple[Any, str, str], ...] = (
    (chat_prompt, "open_image", "decode"),
    (chat_prompt.ChatPrompt, "prepare", "prepare"),
    (ModelBackend, "judge", "model"),
    (stages, "read_score", "parse"),
    (Journal, "begin", "journal"),
    (Journal, "commit", "journal"),
)
"""Where the pipeline does each part. It runs as it is; only these calls are timed from outside."""


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """While open, the parts of every run are timed."""
    with ExitStack() as after:
        for owner, name, part in PLACES:
            before = getattr(owner, name)
            after.callback(setattr, owner, name, before)
            setattr(owner, name, clock.timed(part, before))
        yield
