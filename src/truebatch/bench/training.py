"""Training speed on ragged data: every way on the same samples in one process, and how far each is from even data.

    python -m truebatch.bench.training --device cpu --out docs/results/training_cpu.json
    PYTHONPATH=src python -m truebatch.bench.training --device cuda --out training_cuda.json     (no installation needed)

Forward and backward are timed over the same micro-batches again and again; the median round counts. The optimiser's
update is timed apart and added once for every `step_tokens` real tokens, so that all ways have equal steps. On a CPU
one thread runs, and its CPU seconds count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from truebatch.bench.training_attention import explore_attention
from truebatch.bench.training_ways import Way, all_ways, compare_gradients, trl_way
from truebatch.bench.training_work import Work, make_work
from truebatch.hf.heads import head_of
from truebatch.hf.shapes import SHAPES, Shape, attention_flops_per_pair, build_model, matrix_flops_per_token
from truebatch.planning.distributions import Distribution

FIRST_WAYS = ("one by one", "HF default, 8", "HF group_by_length, 8", "ours packed", "uniform")
GIB = 2**30


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
    Case("bert-tiny", "chat"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBenchConfig:
    """What is measured and for how long."""

    device: str = "cpu"
    cells: int = 16384
    """Cells of a packed row, and the budget of padded rows."""
    longest: int = 2048
    """Samples are cut to this many tokens."""
    step_tokens: int = 131072
    """Real tokens of one update."""
    samples: int = 4096
    way_seconds: float = 4.0
    """Time for the rounds of one way, warming up not counted."""
    seconds: float = 480.0
    """No case and no way begins after this time; what was left out is named."""
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
    "cells": 2048, "longest": 512, "step_tokens": 16384, "samples": 256, "way_seconds": 1.0, "backend": "aot_eager",
    "seconds": 240.0, "cases": TINY,
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
    updating_each: float = 0.0
    """Tokens per second with one update for every micro-batch."""
    compilations: int = 0


Say = Callable[[str], None]


def run_training(config: TrainingBenchConfig, *, out: Path | None = None, say: Say = print) -> dict[str, Any]:
    """Measure all cases; the result is written to `out` after every way, so that an interrupted run keeps its rows."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    began = time.monotonic()
    result: dict[str, Any] = {"rows": [], "left_out": [], "attention": [], **_environment(config)}
    result["peak_tflops"] = measure_peak(config.device)
    say(f"matrix peak {result['peak_tflops']:.1f} TFLOP/s")
    if config.device == "cuda":
        result["attention"] = _kept(lambda: list(explore_attention(longest=config.longest, cells=config.cells)), result)
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
            del model
            torch.compiler.reset()
            model = build_model(shape, longest=config.longest, device=config.device, dtype=_dtype(config.device))
            built = case.shape
        for row in _measure_case(model, shape, case, config, result, began):
            result["rows"].append(asdict(row))
            say(f"{row.case}: {row.way}: {row.tokens_per_second:,.0f} tokens/s, {row.peak_gib:.1f} GiB")
            _write(result, out)
    result["ratios"] = ratios(result["rows"])
    result["seconds"] = time.monotonic() - began
    _write(result, out)
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
    update = _time_update(model, device)
    if case.all_ways:
        result["equality"] = compare_gradients(model, work, device)
    ways = all_ways(model, work, device=device, backend=config.backend)
    peer = trl_way(model, work, device=device) if case.all_ways and not shape.masked else None
    if case.all_ways and peer is None:
        result["left_out"].append("TRL padding-free: trl is not installed")
    for way in [*ways, *([peer] if peer else [])]:
        if not case.all_ways and not way.name.startswith(FIRST_WAYS):
            continue
        if time.monotonic() - began > config.seconds:
            result["left_out"].append(f"{name}: {way.name}: out of time")
            continue
        found = _kept(lambda way=way: _measure_way(model, shape, work, way, config, update, name), result, way.name)  # type: ignore[misc]
        if found is not None:
            found.share_of_peak = _share(model, shape, work, found, result["peak_tflops"])
            yield found


def _kept(measure: Callable[[], Any], result: dict[str, Any], name: str = "attention") -> Any:
    """What was measured, or None with the reason in the result: one way that fails must not cost the others."""
    try:
        return measure()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        result["left_out"].append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def _measure_way(
    model: Any, shape: Shape, work: Work, way: Way, config: TrainingBenchConfig, update: float, case: str
) -> Measured:
    device = torch.device(config.device)
    most = max(way.most // config.thinned, 1)
    batches = [_pinned(b, device) for b in list(way.batches())[:most]]
    if not batches:
        raise ValueError(f"no micro-batch for {way.name}")
    tokens, cells = sum(map(way.tokens, batches)), sum(map(way.cells, batches))
    model.zero_grad(set_to_none=True)
    with way.around():
        for batch in [*batches[:2], *batches[:2]]:
            way.run(batch)
        frames = _num_compilations()
        _reset_peak(device)
        rounds = _rounds(way, batches, device, seconds=config.way_seconds)
        if config.profile and case.endswith("chat") and way.name.startswith(("ours packed", "uniform")):
            print_profile(f"{case}: {way.name}", way, batches[:2])
    took = statistics.median(rounds)
    rate = tokens / took
    step = config.step_tokens / rate + update
    return Measured(
        case=case, way=way.name, tokens_per_second=config.step_tokens / step, peak_gib=_peak(device),
        fill=tokens / cells, share_of_peak=0.0, seconds_per_update=update, rounds=[tokens / t for t in rounds],
        updating_each=tokens / (took + update * len(batches)), compilations=_num_compilations() - frames,
    )  # fmt: skip


def _rounds(way: Way, batches: Sequence[Any], device: torch.device, *, seconds: float) -> list[float]:
    """Seconds of every round over all micro-batches: at least two rounds, at most nine."""
    took: list[float] = []
    began = time.monotonic()
    while len(took) < 2 or (len(took) < 9 and time.monotonic() - began < seconds):
        took.append(_timed(lambda: _run_all(way, batches), device))
    return took


def _run_all(way: Way, batches: Sequence[Any]) -> None:
    for batch in batches:
        way.run(batch)


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.process_time()  # CPU seconds: other work on the machine does not count
        work()
        return time.process_time() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _time_update(model: Any, device: torch.device) -> float:
    """Seconds of one AdamW update of all parameters, in place on zero gradients; its states stay allocated."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=device.type == "cuda")
    optimiser.step()
    model.optimiser_of_benchmark = [optimiser]  # a list, so that it is no module; kept for the peak of memory
    return statistics.median(_timed(optimiser.step, device) for _ in range(3))


def measure_peak(device: str) -> float:
    """TFLOP/s of a large matrix product: bf16 on a card, fp32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        one @ other
    times = [_timed(lambda: [one @ other for _ in range(10)], torch.device(device)) for _ in range(5)]
    return 10 * 2 * size**3 / statistics.median(times) / 1e12


def _share(model: Any, shape: Shape, work: Work, row: Measured, peak_tflops: float) -> float:
    pairs = work.uniform_length if row.way.startswith("uniform") else work.pairs_per_token
    flops = matrix_flops_per_token(model, shape) + attention_flops_per_pair(shape) * pairs
    return row.tokens_per_second * flops / (peak_tflops * 1e12)


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Case -> what the figures to reach are about."""
    found: dict[str, dict[str, float]] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        of = {row["way"]: row for row in rows if row["case"] == case}
        speed = {way: row["tokens_per_second"] for way, row in of.items()}
        best = "ours packed, compiled" if "ours packed, compiled" in speed else "ours packed"
        pairs = [("ours packed", "uniform"), ("ours packed, compiled", "uniform, compiled")]
        pairs += [(way, other) for way in dict.fromkeys([best, "ours packed"]) for other in
                  ("HF default, 8", "HF group_by_length, 8", "one by one", "HF packed, sdpa")]  # fmt: skip
        here = {f"{a} / {b}": speed[a] / speed[b] for a, b in pairs if a in speed and b in speed}
        if best in of and "HF default, 8" in of and of["HF default, 8"]["peak_gib"]:
            here[f"memory, {best} / HF default, 8"] = of[best]["peak_gib"] / of["HF default, 8"]["peak_gib"]
        found[case] = here
    return found


def table(result: dict[str, Any]) -> list[str]:
    """The ratios first, then the rows."""
    lines = []
    for case, found in result["ratios"].items():
        lines += ["", case, *(f"  {ratio:8.3f}  {name}" for name, ratio in found.items())]
        lines.append(f"  {'way':26}{'tokens/s':>12}{'of peak':>9}{'GiB':>8}{'fill':>7}{'recompiled':>12}")
        for row in result["rows"]:
            if row["case"] == case:
                lines.append(
                    f"  {row['way']:26}{row['tokens_per_second']:12,.0f}{row['share_of_peak']:9.1%}"
                    f"{row['peak_gib']:8.1f}{row['fill']:7.1%}{row['compilations']:12}"
                )
    return [*lines, *(f"left out: {what}" for what in result["left_out"])]


def print_profile(title: str, way: Way, batches: Sequence[Any]) -> None:
    """The operations that take most of the time of one way."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    on_card = torch.cuda.is_available()
    kinds += [torch.profiler.ProfilerActivity.CUDA] if on_card else []
    with torch.profiler.profile(activities=kinds) as profile:
        _run_all(way, batches)
        if on_card:
            torch.cuda.synchronize()
    order = "self_device_time_total" if on_card else "self_cpu_time_total"
    sys.stdout.write(f"\nprofile of {title}, {len(batches)} micro-batches\n")
    sys.stdout.write(profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70) + "\n")


def _pinned(batch: Any, device: torch.device) -> Any:
    if device.type != "cuda":
        return batch
    if isinstance(batch, tuple):
        return tuple(part.pin_memory() for part in batch)
    return {k: v.pin_memory() for k, v in batch.items()} if isinstance(batch, dict) else batch.pin_memory()


def _num_compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0


def _environment(config: TrainingBenchConfig) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if config.device == "cuda" else platform.machine()
    return {
        "date": datetime.now(UTC).date().isoformat(), "hardware": name, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": version("transformers"), "python": platform.python_version(),
        "config": asdict(config), "dtype": str(_dtype(config.device)),
    }  # fmt: skip


def _write(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--only", default="", help="cases such as llama-1.1b/chat, with commas")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: a dry run")
    args = parser.parse_args()
    sizes = dict(TINY_SIZES) if args.device == "cpu" else {}
    if args.seconds is not None:
        sizes["seconds"] = args.seconds
    if args.quick:
        sizes |= {"thinned": 4, "way_seconds": 0.0, **({"backend": "eager"} if args.device == "cpu" else {})}
    cases = sizes.get("cases", FULL)
    wanted = tuple(case for case in cases if not args.only or f"{case.shape}/{case.lengths}" in args.only.split(","))
    config = TrainingBenchConfig(device=args.device, profile=args.profile, **{**sizes, "cases": wanted})
    run_training(config, out=args.out, say=lambda line: print(line, flush=True))  # noqa: T201


if __name__ == "__main__":
    main()
