"""One run of the benchmark `exactness_speed`, in a process of its own: what it was told to do as JSON, what came of it as JSON.

python -m benchmarks.training.exactness_child '{"shape": "llama-tiny", ...}'
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from benchmarks.model_shapes import SHAPES, build_model
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.testing.failpoints import armed
from truebatch.testing.length_distributions import example_lengths
from truebatch.training.callbacks import CallbackAction
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.exactness.atoms import ORDER
from truebatch.training.trainer import train

OUT_OF_MEMORY = ("ran out of memory", "out of memory")
HELD_BACK = 1.5
"""Copies of the gradient by which memory is made too small for a step."""
WATCHED = 8
"""Steps whose peak of memory is that of a step with room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRun:
    """What one process does."""

    shape: str
    device: str
    steps: int
    samples_per_step: int
    longest: int
    settings: dict[str, Any]
    """Of `TrainConfig`."""
    order: str = ""
    """As `TRUEBATCH_ATOM_ORDER` has it."""
    short_of_memory: tuple[int, ...] = ()
    """Steps in which memory really runs out on a GPU; on a CPU an error is raised in its place."""
    warm: int = 3
    """Steps that no speed is taken of."""


class MemoryLimit:
    """Leaves less memory than a step takes, in some steps: what all waiting sums of a step need is not there."""

    name = "memory_limit"

    def __init__(self, run: ChildRun, gradient_bytes: int) -> None:
        self._steps, self._bytes, self._peak, self.limited = set(run.short_of_memory), gradient_bytes, 0, list[int]()

    def before_step(self, step: int) -> None:
        """Watch the first steps; later limit the memory, or give it back."""
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        if step == WATCHED:
            self._peak = torch.cuda.max_memory_allocated()
        total = torch.cuda.get_device_properties(0).total_memory
        if step in self._steps:
            torch.cuda.empty_cache()
            limit = self._peak - int(HELD_BACK * self._bytes)
            self.limited.append(limit)
            torch.cuda.set_per_process_memory_fraction(limit / total)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def after_step(self, step: int) -> CallbackAction:
        """Nothing is asked for."""
        return CallbackAction()

    def ended(self, step: int) -> None:
        """Nothing is open."""

    def state(self) -> Mapping[str, Any]:
        """Nothing is kept."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing was kept."""


def run_child(run: ChildRun) -> dict[str, Any]:
    """Train as told; losses and digests, speed, memory, and the lines in which the run speaks of memory and bits."""
    began = time.perf_counter()
    if run.order:
        os.environ[ORDER] = run.order
    is_gpu = run.device == "cuda"
    shape = SHAPES[run.shape]
    model = build_model(shape, longest=run.longest, device=run.device, dtype=torch.float32)
    samples = _samples(run, shape.sizes["vocab_size"])
    head, said = head_of(model), list[str]()
    config = TrainConfig(
        samples_per_step=run.samples_per_step, max_steps=run.steps, epochs=run.steps, learning_rate=1e-4, layout="packed",
        precision="bf16" if is_gpu else "fp32", save_every=1_000_000, stuck_seconds=None, **run.settings,
    )  # fmt: skip
    gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
    limit = MemoryLimit(run, gradient_bytes) if is_gpu and run.short_of_memory else None
    data = TrainData(samples=samples, fields=head.fields)
    trap = nullcontext() if is_gpu or not run.short_of_memory else armed("step.backward:oom:40")
    with trap:
        result = train(
            model, HeadObjective(head=head), data, config, say=said.append, callbacks=[] if limit is None else [limit]
        )
    return {
        **_figures(run, result.records),
        "memory ran out": sum(any(words in line for words in OUT_OF_MEMORY) for line in said),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_gpu else 0.0,
        "seconds": time.perf_counter() - began,
        "said": [line for line in said if line.startswith(("equality:", "exactness:", "compiled rows:", "atom "))][:12],
        **({} if limit is None else {"limits_gib": [one / 2**30 for one in limit.limited]}),
    }


def _samples(run: ChildRun, vocabulary: int) -> list[dict[str, Any]]:
    """As many as one epoch of a dozen steps needs, of the lengths of chats."""
    random = np.random.default_rng(1)
    lengths = np.minimum(example_lengths("chat", 12 * run.samples_per_step, seed=0), run.longest)
    texts = (random.integers(0, vocabulary, int(length)) for length in lengths)
    return [{"input_ids": ids, "labels": ids} for ids in texts]


def _figures(run: ChildRun, records: list[dict[str, Any]]) -> dict[str, Any]:
    timed = records[run.warm :]
    return {
        "steps": len(records),
        "tokens_per_second": statistics.median(one["tokens_per_second"] for one in timed),
        "fill": statistics.fmean(one["fill"] for one in records),
        "loss": records[-1]["loss"],
        "digests": {str(one["step"]): one["digest"] for one in records if "digest" in one},
        "losses": [float(one["loss"]).hex() for one in records],
    }


def main() -> int:
    """The argument is the run as JSON; the last line that is printed is what came of it."""
    given = json.loads(sys.argv[1])
    known = {one.name for one in fields(ChildRun)}
    given["short_of_memory"] = tuple(given.get("short_of_memory", ()))
    assert set(given) <= known, set(given) - known
    print(json.dumps(run_child(ChildRun(**given))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
