"""Training speed on ragged data: every way on the same samples in one process, and how far each is from even data.

    python -m truebatch.bench.training --device cpu --out docs/results/training_cpu.json
    PYTHONPATH=src python -m truebatch.bench.training --device cuda --out training_cuda.json     (no installation needed)

Forward and backward are timed over the same micro-batches again and again, and the median round counts; "new shapes" is
one round over micro-batches that were not run before, as an epoch meets them. The optimiser's update is timed apart and
added once for every `step_tokens` real tokens, so that all ways have equal steps; "update each" adds it for every
micro-batch instead. On a CPU one thread runs, and its CPU seconds count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truebatch.bench.keeping import keep_result, origin
from truebatch.bench.training_attention import explore_attention
from truebatch.bench.training_table import ratios, table
from truebatch.bench.training_timing import (
    forget_models,
    measure_peak,
    num_compilations,
    peak_gib,
    pin_batch,
    print_profile,
    reset_peak_memory,
    time_rounds,
    time_update,
)
from truebatch.bench.training_ways import Way, all_ways, compare_gradients, liger_ways, trl_way
from truebatch.bench.training_work import Work, make_work
from truebatch.errors import ConfigError
from truebatch.hf.heads import head_of
from truebatch.hf.shapes import SHAPES, Shape, attention_flops_per_pair, build_model, matrix_flops_per_token
from truebatch.planning.distributions import Distribution
from truebatch.tensors.cudnnplans import plans_are_possible

EVERY_CASE = (
    "one by one", "HF default, 8", "HF group_by_length, 8", "ours packed", "uniform", "ours packed, compiled",
    "uniform, compiled",
)  # fmt: skip
"""The ways that every case has; the first case has all."""


PROFILED = ("ours packed", "uniform", "ours packed, compiled", "uniform, compiled")


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one distribution."""

    shape: str
    lengths: Distribution
    all_ways: bool = False
    """False leaves out what the first case has shown."""


FULL = (
    Case("llama-1.1b", "chat", True), Case("llama-1.1b", "patient"), Case("llama-1.1b", "bimodal"),
    Case("qwen2-0.5b", "chat"), Case("bert-110m", "chat"),
)  # fmt: skip
TINY = (
    Case("llama-tiny", "chat", True), Case("llama-tiny", "patient"), Case("qwen2-tiny", "chat"),
    Case("qwen2-tiny", "patient"),
    Case("bert-tiny", "chat"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBenchConfig:
    """What is measured and for how long."""

    device: str = "cpu"
    cells: int = 16384
    """Cells of a packed row, and the budget of padded rows."""
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
    backend: str = "inductor"
    """The compiler of compiled ways."""
    profile: bool = False
    """Print where the time of the packed and of the uniform rows goes."""
    cases: tuple[Case, ...] = FULL

    @property
    def slots(self) -> int:
        """Entries of the segment table: room for rows of short samples."""
        return max(self.cells // 8, 64)


TINY_SIZES: dict[str, Any] = {
    "cells": 1024, "longest": 512, "step_tokens": 16384, "samples": 256, "way_seconds": 8.0, "round_tokens": 8192,
    "backend": "aot_eager", "seconds": 900.0, "cases": TINY,
}  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Measured:
    """One way of one case."""

    case: str
    way: str
    tokens_per_second: float
    """Real tokens of a step over its time, the update included."""
    peak_gib: float
    fill: float
    share_of_peak: float
    """Of the card's measured matrix rate, by the operations that real tokens need."""
    seconds_per_update: float
    rounds: list[float] = field(default_factory=list)
    """Tokens per second of every round, forward and backward alone."""
    new_shapes: float = 0.0
    """Tokens per second over micro-batches that were not run before: what it costs to meet a shape is in it."""
    updating_each: float = 0.0
    """Tokens per second with one update for every micro-batch."""
    compilations: int = 0


Say = Callable[[str], None]


def run_training(config: TrainingBenchConfig, *, out: Path | None = None, say: Say) -> dict[str, Any]:
    """Measure all cases; the result is written to `out` after every way, so that an interrupted run keeps its rows."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    began = time.monotonic()
    result: dict[str, Any] = {"rows": [], "left_out": [], "attention": [], **_environment(config)}
    result["peak_tflops"] = measure_peak(config.device)
    say(f"matrix peak {result['peak_tflops']:.1f} TFLOP/s")
    if config.device == "cuda":
        explore = lambda: list(explore_attention(longest=config.longest, cells=config.cells))  # noqa: E731
        result["attention"] = _kept(explore, result) or []
        for row in result["attention"]:
            say(f"attention {row}")
    model: Any = None
    built = ""
    for case in config.cases:
        if time.monotonic() - began > config.seconds:
            result["left_out"].append(f"{case.shape}/{case.lengths}: out of time")
            continue
        shape = SHAPES[case.shape]
        if built != case.shape:
            model = None
            forget_models()
            model = build_model(shape, longest=config.longest, device=config.device, dtype=_dtype(config.device))
            built = case.shape
        for row in _measure_case(model, shape, case, config, result, began):
            result["rows"].append(asdict(row))
            say(f"{row.case}: {row.way}: {row.tokens_per_second:,.0f} tokens/s, {row.peak_gib:.1f} GiB")
            keep_result(result, out)
    result["ratios"] = ratios(result["rows"])
    result["seconds"] = time.monotonic() - began
    keep_result(result, out)
    for line in table(result):
        say(line)
    return result


def _measure_case(
    model: Any, shape: Shape, case: Case, config: TrainingBenchConfig, result: dict[str, Any], began: float
) -> Iterator[Measured]:
    device = torch.device(config.device)
    work = make_work(
        head_of(model), shape, case.lengths, num=config.samples, longest=config.longest, cells=config.cells,
        slots=config.slots,
    )  # fmt: skip
    name = f"{case.shape}/{case.lengths}"
    result.setdefault("work", {})[name] = {
        "mean": float(work.lengths.mean()), "uniform_length": work.uniform_length, "tokens": work.tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    update = time_update(model, device)
    if case.all_ways:
        result["equality"] = compare_gradients(model, work, device)
    ways = all_ways(model, work, device=device, backend=config.backend)
    peers = _peers(model, work, device, result) if case.all_ways and not shape.masked else []
    for way in [*ways, *peers]:
        if not case.all_ways and way.name not in EVERY_CASE:
            continue
        if time.monotonic() - began > config.seconds:
            result["left_out"].append(f"{name}: {way.name}: out of time")
            continue
        found = _kept(lambda way=way: _measure_way(model, shape, work, way, config, update, name), result, way.name)  # type: ignore[misc]
        if found is not None:
            found.share_of_peak = _share(model, shape, work, found, result["peak_tflops"])
            yield found


def _peers(model: Any, work: Work, device: torch.device, result: dict[str, Any]) -> list[Way]:
    """Other libraries, where they are installed; Liger last, as the model keeps its kernels."""
    trl, liger = trl_way(model, work, device=device), liger_ways(model, work, device=device)
    if trl is None:
        result["left_out"].append("TRL padding-free: trl is not installed")
    if not liger:
        result["left_out"].append("Liger: liger-kernel is not installed")
    return [*([trl] if trl else []), *liger]


def _kept(measure: Callable[[], Any], result: dict[str, Any], name: str = "attention") -> Any:
    """What was measured, or None with the reason in the result: one way that fails must not cost the others."""
    try:
        return measure()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        result["left_out"].append(f"{name}: {type(error).__name__}: {str(error)[:300]} ... {str(error)[-1500:]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def _round_of(way: Way, config: TrainingBenchConfig) -> list[Any]:
    """The micro-batches that are timed together."""
    batches = list(way.batches())
    if not config.round_tokens:
        return batches[: max(way.most // config.thinned, 1)]
    needed = config.round_tokens / config.thinned
    tokens = np.cumsum([way.tokens(batch) for batch in batches])
    return batches[: int(np.searchsorted(tokens, needed)) + 1]


def _others(way: Way, timed: list[Any]) -> list[Any]:
    """As many micro-batches again that are not among those of the timed rounds, if there are any."""
    batches = list(way.batches())
    return batches[len(timed) : 2 * len(timed)] or batches[: len(timed)]


def _measure_way(
    model: Any, shape: Shape, work: Work, way: Way, config: TrainingBenchConfig, update: float, case: str
) -> Measured:
    device = torch.device(config.device)
    batches = [pin_batch(b, device) for b in _round_of(way, config)]
    if not batches:
        raise ValueError(f"no micro-batch for {way.name}")
    tokens, cells = sum(map(way.tokens, batches)), sum(map(way.cells, batches))
    model.zero_grad(set_to_none=True)
    with way.around():
        for batch in [*batches[:2], *batches[:2]]:
            way.run(batch)
        frames = num_compilations()
        reset_peak_memory(device)
        if device.type == "cuda":
            way.run(pin_batch(max(way.batches(), key=way.cells), device))  # the epoch's widest: the peak is its peak
        fresh = [pin_batch(b, device) for b in _others(way, batches)]
        first = time_rounds(way, fresh, device, seconds=0.0, least=1)[0] / max(sum(map(way.tokens, fresh)), 1)
        time_rounds(way, batches, device, seconds=0.0, least=1)
        rounds = time_rounds(way, batches, device, seconds=config.way_seconds)
        if config.profile and case.startswith("llama-1.1b/chat") and way.name in PROFILED:
            print_profile(f"{case}: {way.name}", way, batches[:2])
    took = statistics.median(rounds)
    rate = tokens / took
    step = config.step_tokens / rate + update
    return Measured(
        case=case, way=way.name, tokens_per_second=config.step_tokens / step, peak_gib=peak_gib(device),
        fill=tokens / cells, share_of_peak=0.0, seconds_per_update=update, rounds=[tokens / t for t in rounds],
        new_shapes=1 / first, updating_each=tokens / (took + update * len(batches)),
        compilations=num_compilations() - frames,
    )  # fmt: skip


def _share(model: Any, shape: Shape, work: Work, row: Measured, peak_tflops: float) -> float:
    pairs = work.uniform_length if row.way.startswith("uniform") else work.pairs_per_token
    flops = matrix_flops_per_token(model, shape) + attention_flops_per_pair(shape) * pairs
    return row.tokens_per_second * flops / (peak_tflops * 1e12)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _environment(config: TrainingBenchConfig) -> dict[str, Any]:
    planned = ("nvidia-cudnn-frontend",) if config.device == "cuda" and plans_are_possible() else ()
    return {
        **origin("truebatch.bench.training", config, "transformers", *planned),
        "threads": torch.get_num_threads(),
        "dtype": str(_dtype(config.device)),
    }


def make_config(
    *, device: str, only: str = "", seconds: float | None = None, quick: bool = False, profile: bool = False
) -> TrainingBenchConfig:
    """Full sizes for a card and tiny ones for a CPU; `only` names cases, with commas."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError("this device cannot be measured", seen=f"device={device!r}", do="use cpu, or cuda on a card")
    sizes: dict[str, Any] = dict(TINY_SIZES) if device == "cpu" else {"cases": FULL}
    if seconds is not None:
        sizes["seconds"] = seconds
    if quick:
        sizes |= {"thinned": 4, "way_seconds": 0.0, **({"backend": "eager"} if device == "cpu" else {})}
    known = {f"{case.shape}/{case.lengths}": case for case in sizes["cases"]}
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(known)
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise ConfigError("there is no such case", seen=f"{unknown}", do=f"use {', '.join(known)}")
    return TrainingBenchConfig(
        device=device, profile=profile, **{**sizes, "cases": tuple(known[name] for name in wanted)}
    )


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--only", default="", help="cases such as llama-1.1b/chat, with commas")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: a dry run")
    args = parser.parse_args()
    config = make_config(
        device=args.device, only=args.only, seconds=args.seconds, quick=args.quick, profile=args.profile
    )
    run_training(config, out=args.out, say=_say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
