"""Time the ways of one case: those that are compared with each other in turns, round by round.

an epoch laid out -> micro-batches like it -> warm, its peak of memory, shapes not met before -> rounds in turns -> rows
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.training.config import Case, TrainingBenchConfig
from benchmarks.training.methods import Way
from benchmarks.training.timing import (
    GIB,
    median_host_seconds,
    num_compilations,
    peak_gib,
    pin_batch,
    print_profile,
    reset_peak_memory,
    time_rounds,
)
from benchmarks.training.workload import Part, Work, new_share, pairs_per_token, typical_parts

TURNS = 3
"""So often ways that are timed together take turns: a host or a GPU that is slower for a while is so for all of them."""
PROFILED = ("ours packed", "uniform", "ours packed, compiled", "uniform, compiled")


@dataclass(kw_only=True, slots=True)
class Measured:
    """One way of one case."""

    case: str
    way: str
    tokens_per_second: float
    """Real tokens of a step over its time, the update included."""
    peak_gib: float
    fill: float
    pairs_per_token: float
    """Of the micro-batches that were timed: ways are compared at equal work, and this says how equal it was."""
    share_of_peak: float
    """Of the GPU's measured matrix rate, by the operations that real tokens need."""
    seconds_per_update: float
    micro_batches: int
    """Of one round."""
    rounds: list[float] = field(default_factory=list)
    """Tokens per second of every round, forward and backward alone."""
    new_shapes: float = 0.0
    """Tokens per second over micro-batches that were not run before: what it costs to meet a shape is in it."""
    new_share: float = 0.0
    """Of the micro-batches of the epoch, those whose shape none before them had."""
    first_epoch: float = 0.0
    """Tokens per second of an epoch in which so many shapes are new: computed from both speeds, not run."""
    updating_each: float = 0.0
    """Tokens per second with one update for every micro-batch."""
    compilations: int = 0
    host_seconds: float = 0.0
    """On a GPU, of our ways and even rows: what the host needs to launch one micro-batch, the GPU idle before. Where that
    is about as long as the GPU needs for it, the GPU waits, and what is measured is the host. (Of a large model the host
    waits in turn, for room among what the GPU was given to do.)"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A case with its model and its samples."""

    case: Case
    model: Any
    work: Work
    update: float
    """Seconds of one update of the model."""


Attempt = Callable[[Callable[[], Any], str], Any]
"""What came of some work, or None: one way that fails must not cost the others."""


def measure_together(
    prepared: Prepared,
    ways: Sequence[Way],
    config: TrainingBenchConfig,
    attempt: Attempt,
    is_late: Callable[[str], bool],
) -> Iterator[tuple[Measured, float]]:
    """The row of every way, and the seconds it took; ways for which it is too late are not begun."""
    begun = [
        attempt(lambda way=way: _Begun(prepared, way, config), way.name)  # type: ignore[misc]
        for way in ways if not is_late(way.name)
    ]  # fmt: skip
    running: list[_Begun] = [one for one in begun if one is not None]
    turns = TURNS if len(running) > 1 else 1
    for _ in range(turns):
        running = [one for one in running if attempt(lambda one=one: one.take_turn(turns), one.way.name)]  # type: ignore[misc]
    for one in running:
        yield one.row(), one.seconds


class _Begun:
    """One way that is being measured."""

    def __init__(self, prepared: Prepared, way: Way, config: TrainingBenchConfig) -> None:
        began = time.monotonic()
        self.prepared, self.way, self.config = prepared, way, config
        self.device = torch.device(config.device)
        self.rounds: list[float] = []
        self.compilations = 0
        self.is_profiled = False
        epoch = list(way.parts())
        if not epoch:
            raise ValueError(f"no micro-batch for {way.name}")
        self.new_share = new_share(epoch)
        self.timed, others = typical_parts(epoch, _round_size(epoch, way, prepared.case, config))
        self.batches, fresh = (
            [pin_batch(part.make(), self.device) for part in parts] for parts in (self.timed, others)
        )
        new_tokens = sum(part.tokens for part in others or self.timed)
        prepared.model.zero_grad(set_to_none=True)
        with way.around():
            for batch in self.batches[:2] * (2 if way.compiled else 1):
                way.run(batch)
            if self.device.type == "cuda":  # what is made once for all shapes, like kernels for rows of many samples
                way.run(pin_batch(max(epoch, key=lambda part: len(part.lengths)).make(), self.device))
            frames = num_compilations()
            reset_peak_memory(self.device)
            if self.device.type == "cuda":  # the epoch's peak is its peak
                way.run(pin_batch(max(epoch, key=lambda part: part.cells).make(), self.device))
            first = time_rounds(way, fresh or self.batches, self.device, seconds=0.0, least=1)[0]
            self.new_shapes = new_tokens / first
            if fresh:
                time_rounds(way, self.batches, self.device, seconds=0.0, least=1)
            self.host_seconds = median_host_seconds(way, self.batches, self.device)
            self.compilations += num_compilations() - frames
            self.peak_gib = max(peak_gib(self.device) - way.held_apart / GIB, 0.0)
        self.seconds = time.monotonic() - began

    def take_turn(self, turns: int) -> bool:
        """One of so many turns: rounds over the micro-batches that are timed."""
        began, way, config = time.monotonic(), self.way, self.config
        least = -(-(2 if way.is_other else 3) // turns)
        with way.around():
            frames = num_compilations()
            if turns > 1:
                way.run(self.batches[0])  # what it takes to come back to this way
            self.rounds += time_rounds(
                way, self.batches, self.device, seconds=config.way_seconds / turns, least=least
            )  # fmt: skip
            self.compilations += num_compilations() - frames
            if config.profile and way.name in PROFILED and not self.is_profiled:
                print_profile(f"{self.prepared.case.name}: {way.name}", way, self.batches[:2])
                self.is_profiled = True
        self.seconds += time.monotonic() - began
        return True

    def row(self) -> Measured:
        """What was measured."""
        update, tokens = self.prepared.update, sum(part.tokens for part in self.timed)
        took = statistics.median(self.rounds)
        return Measured(
            case=self.prepared.case.name, way=self.way.name, tokens_per_second=self._with_updates(tokens / took),
            peak_gib=self.peak_gib, fill=tokens / sum(part.cells for part in self.timed),
            pairs_per_token=pairs_per_token(self.timed), share_of_peak=0.0, seconds_per_update=update,
            micro_batches=len(self.batches), rounds=[tokens / t for t in self.rounds], new_shapes=self.new_shapes,
            new_share=self.new_share,
            first_epoch=self._with_updates(mixed_speed(tokens / took, self.new_shapes, self.new_share)),
            updating_each=tokens / (took + update * len(self.batches)), compilations=self.compilations,
            host_seconds=self.host_seconds,
        )  # fmt: skip

    def _with_updates(self, tokens_per_second: float) -> float:
        """The same with an update for every `step_tokens` of them."""
        whole = self.config.step_tokens
        return whole / (whole / tokens_per_second + self.prepared.update)


def mixed_speed(known: float, new: float, share: float) -> float:
    """Tokens per second where that share of the micro-batches runs at the speed of new shapes."""
    return 1 / (share / new + (1 - share) / known)


def _round_size(parts: Sequence[Part], way: Way, case: Case, config: TrainingBenchConfig) -> int:
    """How many micro-batches are timed together."""
    tokens = config.step_tokens if case.whole_steps and not way.is_other else config.round_tokens
    if not tokens:
        return max(way.most // config.thinned, 1)
    each = sum(part.tokens for part in parts) / len(parts)
    return max(math.ceil(tokens / config.thinned / each), 1)
