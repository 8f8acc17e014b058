"""What the training benchmark measures: cases, ways and sizes, and how they are chosen by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness.choices import read_names
from benchmarks.model_shapes import SHAPES
from benchmarks.training.methods import EVERY_CASE
from benchmarks.training.peers import PEERS, WAYS
from truebatch.errors import ConfigError
from truebatch.testing.length_distributions import Distribution


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one distribution."""

    shape: str
    lengths: Distribution
    all_ways: bool = False
    """False leaves out what the first case has shown."""
    cells: int | None = None
    """Of its rows, if they are not those of the benchmark: a small model needs more cells to fill a GPU, and still less
    than half of the memory that padding takes. The encoder's are no multiple of 256: there torch 2.11 takes a kernel for
    the gradient of a layer norm that needs a tenth longer."""
    whole_steps: bool = False
    """A round of our ways and of even rows has the tokens of a step: of a small model the GPU waits for the host where a
    round begins, as it does where a step begins, and with shorter rounds it would count more than in training."""

    @property
    def name(self) -> str:
        """Shape and distribution, as `--only` names a case."""
        return f"{self.shape}/{self.lengths}"


FULL = (
    Case("llama-1.1b", "chat", True), Case("llama-1.1b", "patient"), Case("llama-1.1b", "bimodal"),
    Case("qwen2-0.5b", "chat"), Case("bert-110m", "chat", cells=24448, whole_steps=True),
)  # fmt: skip
TINY = (
    Case("llama-tiny", "chat", True), Case("llama-tiny", "patient"), Case("qwen2-tiny", "chat"),
    Case("qwen2-tiny", "patient"),
    Case("bert-tiny", "chat"),
)  # fmt: skip
STATEFUL_TINY = (Case("qwen3_next-tiny", "patient"), Case("falcon_h1-tiny", "patient"))
STATEFUL_FULL = (Case("qwen3.5-1b", "patient"), Case("qwen3.5-1b", "chat"))
"""Models with a state along the row, measured where `--only` names them: most of their time is not attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBenchConfig:
    """What is measured and for how long."""

    device: str = "cpu"
    cells: int = 16384
    """Cells of a packed row, and the budget of padded rows, unless the case has its own."""
    longest: int = 4096
    """Samples are cut to this many tokens."""
    step_tokens: int = 131072
    """Real tokens of one update."""
    samples: int = 4096
    way_seconds: float = 1.0
    """Time for the rounds of one way, warming up not counted."""
    seconds: float = 480.0
    """No case and no way begins after this time; what was left out is named."""
    round_tokens: int = 0
    """A round of every way has at least so many real tokens, if it is not 0; otherwise a number set for each way."""
    thinned: int = 1
    """A round has this many times fewer micro-batches: for trying the benchmark out."""
    threads: int = 1
    """Of a CPU."""
    backend: str = "inductor"
    """The compiler of compiled ways."""
    profile: bool = False
    """Print where the time of the packed and of the uniform rows goes."""
    cases: tuple[Case, ...] = FULL
    ways: tuple[str, ...] = ()
    """Only these ways, in every case; none named: those that belong to the case."""

    def __post_init__(self) -> None:
        if self.cells < self.longest:
            raise ConfigError(
                "a row must hold the longest sample",
                seen=f"cells={self.cells}, samples of up to {self.longest} tokens",
                do=f"set cells to {self.longest} or more",
            )

    def cells_of(self, case: Case) -> int:
        """Cells of a packed row of this case."""
        return self.cells if case.cells is None else case.cells

    def ways_of(self, case: Case) -> tuple[str, ...]:
        """The names of what is measured in a case; of an encoder no way that is for causal models alone."""
        wanted = self.ways or (WAYS if case.all_ways else EVERY_CASE)
        return tuple(name for name in wanted if not (SHAPES[case.shape].masked and name in PEERS))


TINY_SIZES: dict[str, Any] = {
    "cells": 1024, "longest": 512, "step_tokens": 16384, "samples": 256, "way_seconds": 8.0, "round_tokens": 8192,
    "backend": "aot_eager", "seconds": 900.0, "cases": TINY,
}  # fmt: skip


def make_config(
    *, device: str, only: str = "", ways: str = "", seconds: float | None = None, quick: bool = False,
    profile: bool = False, cells: int | None = None, threads: int | None = None,
) -> TrainingBenchConfig:  # fmt: skip
    """Full sizes for a GPU and tiny ones for a CPU; `only` names cases and `ways` ways, with commas."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError("this device cannot be measured", seen=f"device={device!r}", do="use cpu, or cuda on a GPU")
    sizes: dict[str, Any] = dict(TINY_SIZES) if device == "cpu" else {"cases": FULL}
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError("a time is a number of seconds above 0", seen=f"seconds={seconds}", do="for example 480")
    if seconds is not None:
        sizes["seconds"] = seconds
    if threads is not None:
        if device != "cpu" or threads < 1:
            raise ConfigError(
                "threads are those of a CPU, one or more", seen=f"threads={threads}, device={device!r}",
                do="leave --threads out on a GPU, or set it to 1 or more",
            )  # fmt: skip
        sizes["threads"] = threads
    if cells is not None:
        sizes |= {"cells": cells, "cases": tuple(replace(case, cells=None) for case in sizes["cases"])}
    if quick:
        sizes |= {"thinned": 4, "way_seconds": 0.0, **({"backend": "eager"} if device == "cpu" else {})}
    more = STATEFUL_TINY if device == "cpu" else STATEFUL_FULL
    known = {case.name: case for case in (*sizes["cases"], *more)}
    cases = tuple(known[name] for name in read_names(only, list(known), kind="case")) or sizes["cases"]
    named = read_names(ways, WAYS, kind="way")
    return TrainingBenchConfig(device=device, profile=profile, **{**sizes, "cases": cases, "ways": named})
