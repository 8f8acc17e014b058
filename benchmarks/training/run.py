"""Training speed on ragged data: every way on the same samples in one process, and how far each is from even data.

    python -m benchmarks training --device cpu --out docs/results/training_cpu.json
    python -m benchmarks training --device cuda --out training_cuda.json     (no installation needed)

Forward and backward are timed over the same micro-batches again and again, packed rows and even ones in turns (on a CPU all
ways), and the median round counts; "new shapes" is one round over micro-batches that were not run before, as an epoch meets
them. Of every way those are timed that are most like its whole epoch in cells, pairs and micro-batches for a token; memory
is that of the epoch's widest. The optimiser's update is timed apart and added once for every `step_tokens` real tokens, so
that all ways have equal steps; "update each" adds it for every micro-batch instead. On a CPU one thread runs and its CPU
seconds count; with `--threads 2` and more the clock does.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import check_can_keep, keep_result, origin
from benchmarks.model_shapes import SHAPES, attention_flops_per_pair, build_model, matrix_flops_per_token
from benchmarks.training.attention_gap import explore_attention
from benchmarks.training.config import Case, TrainingBenchConfig, make_config
from benchmarks.training.methods import OWN, Way, all_ways, compare_gradients
from benchmarks.training.peers import LIGER, MAKERS, PEERS, TITAN, TRL, UNSLOTH, WAYS
from benchmarks.training.rounds import Measured, Prepared, measure_together
from benchmarks.training.table import ratios, table
from benchmarks.training.timing import forget_models, measure_peak, time_update
from benchmarks.training.workload import make_work
from truebatch.attention.cudnn_graph import plans_are_possible
from truebatch.hf.heads.heads import head_of
from truebatch.verification.census.processes import Workers, run_each

STAGES = ((*OWN, TRL, TITAN), LIGER, UNSLOTH)
"""Ways that share models; the later ones leave something behind in the process, the last so much that they get their own."""
APART_S = 120.0
"""A process of its own may take so much longer than its time: reading a model and the last way count."""
FAILURES = (RuntimeError, ValueError, TypeError, ImportError, AttributeError, AssertionError)
"""What a library that does not go with a model or with this torch raises."""
Say = Callable[[str], None]


def run_training(config: TrainingBenchConfig, *, out: Path | None = None, say: Say) -> dict[str, Any]:
    """Measure all cases; the result is written to `out` after every way, or several that are timed in turns."""
    check_can_keep(out)
    if config.device == "cpu":
        torch.set_num_threads(config.threads)
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
        _keep(result, out, began)
    _keep(result, out, began)
    for line in table(result):
        say(line)
    return result


def _keep(result: dict[str, Any], out: Path | None, began: float) -> None:
    """With the ratios of what there is so far: a run may be ended from outside."""
    result |= {"ratios": ratios(result["rows"]), "seconds": time.monotonic() - began}
    keep_result(result, out)


def _measure_all(config: TrainingBenchConfig, result: dict[str, Any], began: float) -> Iterator[Measured]:
    """All cases; then those of libraries that leave something behind in the process, on models of their own."""
    wanted = {name for case in config.cases for name in config.ways_of(case)}
    absent = {name: module for name, module in PEERS.items() if name in wanted and find_spec(module) is None}
    result["left_out"] += [f"{name}: {module} is not installed" for name, module in absent.items()]
    for stage in STAGES:
        names = tuple(name for name in stage if name in wanted and name not in absent)
        cases = tuple(case for case in config.cases if set(config.ways_of(case)) & set(names))
        if stage is UNSLOTH and names and wanted != set(names):
            yield from _measure_apart(replace(config, cases=cases, ways=names), result, began)
        else:
            yield from _measure_cases(cases, config, result, began, names)
        forget_models()


def _measure_apart(config: TrainingBenchConfig, result: dict[str, Any], began: float) -> Iterator[Measured]:
    """The ways of one library in a process of their own, which is killed when the time is over."""
    left = config.seconds - (time.monotonic() - began)
    if left < 0:
        result["left_out"] += [f"{name}: out of time" for name in config.ways]
        return
    how = Workers(jobs=1, time_limit_s=left + APART_S, method="spawn")
    for ended in run_each([replace(config, seconds=left)], _measure_quietly, how):
        if ended.problem:
            result["left_out"].append(f"{', '.join(config.ways)}: {ended.problem}")
            continue
        result["left_out"] += ended.result["left_out"]
        for case, about in ended.result.get("work", {}).items():
            result.setdefault("work", {}).setdefault(case, about)["seconds_of_ways"] |= about["seconds_of_ways"]
        yield from (Measured(**row) for row in ended.result["rows"])


def _measure_quietly(config: TrainingBenchConfig) -> dict[str, Any]:
    return run_training(config, say=lambda _: None)


def _measure_cases(
    cases: Sequence[Case], config: TrainingBenchConfig, result: dict[str, Any], began: float, names: Sequence[str]
) -> Iterator[Measured]:
    model: Any = None
    built = ""
    for case in cases:
        if time.monotonic() - began > config.seconds:
            which = "" if OWN[0] in names else f", {names[0]}"
            result["left_out"].append(f"{case.name}{which}: out of time")
            continue
        if built != case.shape:
            model = None
            forget_models()
            shape = SHAPES[case.shape]
            model = build_model(shape, longest=config.longest, device=config.device, dtype=_dtype(config.device))
            built = case.shape
        yield from _measure_case(model, case, config, result, began, names)


def _measure_case(
    model: Any, case: Case, config: TrainingBenchConfig, result: dict[str, Any], began: float, names: Sequence[str]
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
        "uniform_length": work.uniform_length, "pairs_per_token": work.pairs_per_token, "tokens": work.tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    prepared = Prepared(case=case, model=model, work=work, update=time_update(model, device))
    if case.all_ways and not config.ways and "ours packed" in names:
        result["equality"] = compare_gradients(model, work, device)
    attempt = lambda work, name: _kept(work, result, name)  # noqa: E731

    def is_late(way: str) -> bool:
        if time.monotonic() - began > config.seconds:
            result["left_out"].append(f"{case.name}: {way}: out of time")
            return True
        return False

    ways = _ways_of(prepared, config, result, names)
    for _, group in itertools.groupby(ways, key=lambda way: way.together or way.name):
        for found, seconds in measure_together(prepared, list(group), config, attempt, is_late):
            about["seconds_of_ways"][found.way] = round(seconds, 1)
            found.share_of_peak = _share(prepared, found, result["peak_tflops"])
            yield found


def _ways_of(
    prepared: Prepared, config: TrainingBenchConfig, result: dict[str, Any], names: Sequence[str]
) -> list[Way]:  # fmt: skip
    """Those of these ways that the case has, in the order of `WAYS`."""
    known: dict[str, Any] = {"device": torch.device(config.device), "backend": config.backend}
    wanted = [name for name in config.ways_of(prepared.case) if name in names]
    makers: dict[str, Callable[..., list[Way]]] = {"ours": all_ways} if set(wanted) & set(OWN) else {}
    makers |= {PEERS[name]: MAKERS[PEERS[name]] for name in wanted if name in PEERS}
    found: dict[str, Way] = {}
    for who, make in makers.items():
        ways = _kept(partial(make, prepared.model, prepared.work, **known), result, who)
        found |= {way.name: way for way in ways or []}
    return [found[name] for name in WAYS if name in wanted and name in found]


def _kept(measure: Callable[[], Any], result: dict[str, Any], name: str = "attention") -> Any:
    """What was measured, or None with the reason in the result: one way that fails must not cost the others."""
    try:
        return measure()
    except FAILURES as error:
        result["left_out"].append(f"{name}: {type(error).__name__}: {str(error)[:300]} ... {str(error)[-1500:]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def _share(prepared: Prepared, row: Measured, peak_tflops: float) -> float:
    work, shape = prepared.work, SHAPES[prepared.case.shape]
    flops = matrix_flops_per_token(prepared.model, labelled=work.labelled)
    flops += attention_flops_per_pair(shape) * row.pairs_per_token
    return row.tokens_per_second * flops / (peak_tflops * 1e12)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _environment(config: TrainingBenchConfig) -> dict[str, Any]:
    used = ["nvidia-cudnn-frontend"] if config.device == "cuda" and plans_are_possible() else []
    names = [module.replace("_", "-") for module in dict.fromkeys(PEERS.values())]
    used += [name for name in names if any(distributions(name=name))]
    return {
        **origin(config, "transformers", *used, command=command_line("benchmarks.training.run")),
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
    parser.add_argument("--threads", type=int, default=None, help="of a CPU; one counts CPU seconds, more the clock")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: a dry run")
    args = parser.parse_args()
    config = make_config(
        device=args.device, only=args.only, ways=args.ways, seconds=args.seconds, quick=args.quick,
        profile=args.profile, cells=args.cells, threads=args.threads,
    )  # fmt: skip
    run_training(config, out=args.out, say=_say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
