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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truebatch.bench.keeping import keep_result, origin
from truebatch.bench.training_attention import explore_attention
from truebatch.bench.training_settings import Case, TrainingBenchConfig, make_config
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
from truebatch.bench.training_ways import (
    LIGER,
    TRL,
    WAYS,
    Way,
    all_ways,
    compare_gradients,
    liger_kernels,
    liger_ways,
    trl_way,
)
from truebatch.bench.training_work import Work, make_work
from truebatch.hf.heads import head_of
from truebatch.hf.shapes import SHAPES, attention_flops_per_pair, build_model, matrix_flops_per_token
from truebatch.tensors.cudnnplans import plans_are_possible

PEERS = ("trl", "liger-kernel")
"""Libraries that are measured beside ours where they are installed."""
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
    share_of_peak: float
    """Of the card's measured matrix rate, by the operations that real tokens need."""
    seconds_per_update: float
    micro_batches: int
    """Of one round."""
    rounds: list[float] = field(default_factory=list)
    """Tokens per second of every round, forward and backward alone."""
    new_shapes: float = 0.0
    """Tokens per second over micro-batches that were not run before: what it costs to meet a shape is in it."""
    updating_each: float = 0.0
    """Tokens per second with one update for every micro-batch."""
    compilations: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A case with its model and its samples."""

    case: Case
    model: Any
    work: Work
    update: float
    """Seconds of one update of the model."""


Say = Callable[[str], None]


def run_training(config: TrainingBenchConfig, *, out: Path | None = None, say: Say) -> dict[str, Any]:
    """Measure all cases; the result is written to `out` after every way, so that an interrupted run keeps its rows."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    began = time.monotonic()
    result: dict[str, Any] = {"rows": [], "left_out": [], "attention": [], **_environment(config)}
    result["peak_tflops"] = measure_peak(config.device)
    say(f"matrix peak {result['peak_tflops']:.1f} TFLOP/s")
    if config.device == "cuda" and not config.ways:
        explore = lambda: list(explore_attention(longest=config.longest, cells=config.cells))  # noqa: E731
        result["attention"] = _kept(explore, result) or []
        for row in result["attention"]:
            say(f"attention {row}")
    for row in _measure_all(config, result, began):
        result["rows"].append(asdict(row))
        say(f"{row.case}: {row.way}: {row.tokens_per_second:,.0f} tokens/s, {row.peak_gib:.1f} GiB; "
            f"{time.monotonic() - began:.0f} s")  # fmt: skip
        keep_result(result, out)
    result["ratios"] = ratios(result["rows"])
    result["seconds"] = time.monotonic() - began
    keep_result(result, out)
    for line in table(result):
        say(line)
    return result


def _measure_all(config: TrainingBenchConfig, result: dict[str, Any], began: float) -> Iterator[Measured]:
    """All cases; then Liger's rows, on models of their own: its kernels stay in every model of the process."""
    for is_liger in (False, True):
        cases = [case for case in config.cases if any((way in LIGER) == is_liger for way in config.ways_of(case))]
        if is_liger and cases and liger_kernels() is None:
            result["left_out"].append("Liger: liger-kernel is not installed")
            continue
        yield from _measure_cases(cases, config, result, began, is_liger=is_liger)
        forget_models()


def _measure_cases(
    cases: Sequence[Case], config: TrainingBenchConfig, result: dict[str, Any], began: float, *, is_liger: bool
) -> Iterator[Measured]:
    model: Any = None
    built = ""
    for case in cases:
        if time.monotonic() - began > config.seconds:
            result["left_out"].append(f"{case.name}{', Liger' if is_liger else ''}: out of time")
            continue
        if built != case.shape:
            model = None
            forget_models()
            shape = SHAPES[case.shape]
            model = build_model(shape, longest=config.longest, device=config.device, dtype=_dtype(config.device))
            built = case.shape
        yield from _measure_case(model, case, config, result, began, is_liger=is_liger)


def _measure_case(
    model: Any, case: Case, config: TrainingBenchConfig, result: dict[str, Any], began: float, *, is_liger: bool
) -> Iterator[Measured]:
    device, shape = torch.device(config.device), SHAPES[case.shape]
    cells = config.cells_of(case)
    work = make_work(
        head_of(model), shape, case.lengths, num=config.samples, longest=config.longest, cells=cells,
        slots=max(cells // 8, 64),  # room for rows of short samples
    )  # fmt: skip
    about = result.setdefault("work", {}).setdefault(case.name, {"seconds_of_ways": {}})
    about |= {
        "cells": cells, "labelled": work.labelled, "mean": float(work.lengths.mean()),
        "uniform_length": work.uniform_length, "tokens": work.tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    prepared = Prepared(case=case, model=model, work=work, update=time_update(model, device))
    if case.all_ways and not config.ways and not is_liger:
        result["equality"] = compare_gradients(model, work, device)
    for way in _ways_of(prepared, config, result, is_liger=is_liger):
        if time.monotonic() - began > config.seconds:
            result["left_out"].append(f"{case.name}: {way.name}: out of time")
            continue
        at = time.monotonic()
        found = _kept(lambda way=way: _measure_way(prepared, way, config), result, way.name)  # type: ignore[misc]
        about["seconds_of_ways"][way.name] = round(time.monotonic() - at, 1)
        if found is not None:
            found.share_of_peak = _share(prepared, found, result["peak_tflops"])
            yield found


def _ways_of(
    prepared: Prepared, config: TrainingBenchConfig, result: dict[str, Any], *, is_liger: bool
) -> list[Way]:  # fmt: skip
    """The ways of a case in the order of `WAYS`, those of other libraries where they are installed."""
    model, work, device = prepared.model, prepared.work, torch.device(config.device)
    wanted = config.ways_of(prepared.case)
    if is_liger:
        apply = liger_kernels()
        assert apply is not None
        return [way for way in liger_ways(model, work, apply, device=device) if way.name in wanted]
    found = {way.name: way for way in all_ways(model, work, device=device, backend=config.backend)}
    if TRL in wanted:
        trl = trl_way(model, work, device=device)
        if trl is None:
            result["left_out"].append("TRL padding-free: trl is not installed")
        else:
            found[TRL] = trl
    return [found[name] for name in WAYS if name in wanted and name in found]


def _kept(measure: Callable[[], Any], result: dict[str, Any], name: str = "attention") -> Any:
    """What was measured, or None with the reason in the result: one way that fails must not cost the others."""
    try:
        return measure()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        result["left_out"].append(f"{name}: {type(error).__name__}: {str(error)[:300]} ... {str(error)[-1500:]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def _round_of(batches: list[Any], way: Way, case: Case, config: TrainingBenchConfig) -> list[Any]:
    """The micro-batches that are timed together."""
    if not config.round_tokens:
        is_thin = way.is_other and not case.all_ways
        return batches[: max(way.most // config.thinned // (config.later_thinned if is_thin else 1), 1)]
    needed = config.round_tokens / config.thinned
    tokens = np.cumsum([way.tokens(batch) for batch in batches])
    return batches[: int(np.searchsorted(tokens, needed)) + 1]


def _measure_way(prepared: Prepared, way: Way, config: TrainingBenchConfig) -> Measured:
    device, name, update = torch.device(config.device), prepared.case.name, prepared.update
    all_batches = list(way.batches())
    if not all_batches:
        raise ValueError(f"no micro-batch for {way.name}")
    batches = [pin_batch(b, device) for b in _round_of(all_batches, way, prepared.case, config)]
    others = all_batches[len(batches) : 2 * len(batches)]  # as many again that are in no timed round, if there are any
    tokens, cells = sum(map(way.tokens, batches)), sum(map(way.cells, batches))
    prepared.model.zero_grad(set_to_none=True)
    with way.around():
        for batch in batches[:2] * (2 if way.compiled else 1):
            way.run(batch)
        if device.type == "cuda":  # what is made once for all shapes, like kernels for rows of many samples
            way.run(pin_batch(max(all_batches, key=lambda batch: getattr(batch, "num_samples", 0)), device))
        frames = num_compilations()
        reset_peak_memory(device)
        if device.type == "cuda":
            way.run(pin_batch(max(all_batches, key=way.cells), device))  # the epoch's widest: the peak is its peak
        fresh = [pin_batch(b, device) for b in others] or batches
        first = time_rounds(way, fresh, device, seconds=0.0, least=1)[0] / max(sum(map(way.tokens, fresh)), 1)
        if fresh is not batches:
            time_rounds(way, batches, device, seconds=0.0, least=1)
        rounds = time_rounds(way, batches, device, seconds=config.way_seconds, least=2 if way.is_other else 3)
        if config.profile and way.name in PROFILED:
            print_profile(f"{name}: {way.name}", way, batches[:2])
    took = statistics.median(rounds)
    step = config.step_tokens / (tokens / took) + update
    return Measured(
        case=name, way=way.name, tokens_per_second=config.step_tokens / step, peak_gib=peak_gib(device),
        fill=tokens / cells, share_of_peak=0.0, seconds_per_update=update, micro_batches=len(batches),
        rounds=[tokens / t for t in rounds], new_shapes=1 / first,
        updating_each=tokens / (took + update * len(batches)), compilations=num_compilations() - frames,
    )  # fmt: skip


def _share(prepared: Prepared, row: Measured, peak_tflops: float) -> float:
    work, shape = prepared.work, SHAPES[prepared.case.shape]
    pairs = work.uniform_length if row.way.startswith("uniform") else work.pairs_per_token
    flops = matrix_flops_per_token(prepared.model, labelled=work.labelled) + attention_flops_per_pair(shape) * pairs
    return row.tokens_per_second * flops / (peak_tflops * 1e12)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _environment(config: TrainingBenchConfig) -> dict[str, Any]:
    used = ["nvidia-cudnn-frontend"] if config.device == "cuda" and plans_are_possible() else []
    used += [name for name in PEERS if any(distributions(name=name))]
    return {
        **origin("truebatch.bench.training", config, "transformers", *used),
        "threads": torch.get_num_threads(),
        "dtype": str(_dtype(config.device)),
    }


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--only", default="", help="cases such as llama-1.1b/chat, with commas")
    parser.add_argument("--ways", default="", help="ways such as 'ours packed,uniform', with commas")
    parser.add_argument("--cells", type=int, default=None, help="of a packed row, and the budget of padded ones")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: a dry run")
    args = parser.parse_args()
    config = make_config(
        device=args.device, only=args.only, ways=args.ways, seconds=args.seconds, quick=args.quick,
        profile=args.profile, cells=args.cells,
    )  # fmt: skip
    run_training(config, out=args.out, say=_say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
