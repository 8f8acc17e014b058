"""Does the budget that `fit` gives hold? Probe a model, take the budget, train at it, and compare the peaks of memory.

    python -m benchmarks fit_cuda --out fit_cuda.json
    python -m benchmarks fit_cuda --only bert-slim --seconds 545 --out fit_cuda_whole.json
    python -m benchmarks fit_cuda --device cpu --quick     (a dry run of the same code with tiny models)

Needs torch, transformers and numpy. Models have random weights in bf16, samples are log-normal in length and packed;
every step is one or two micro-batches near the budget and one update of AdamW. `card_gib` limits the process to a part of the
memory, so that many steps take little time; 0 is the whole GPU. `--only` names cases: a shape, behind which the GiB of
a part of the GPU may stand. Exits with 1 when a figure is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.choices import read_names
from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, origin
from benchmarks.model_shapes import SHAPES, Shape, build_model
from truebatch.batch.collate import collate
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.plan import build_plan
from truebatch.testing.length_distributions import example_lengths
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.memory.cost_model import Sizes, largest_cells
from truebatch.training.memory.fit import fit_memory
from truebatch.training.memory.measure import CountStorages, free_bytes_of, held_bytes, usable_bytes
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, apply_update, step_counts, take_gradients

GIB = 2**30
LEAST_SHARE, LARGEST_ERROR = 0.85, 0.05
SHAPES_HERE = {
    **SHAPES,
    # Little arithmetic for the memory it takes: hundreds of steps that fill a part of a GPU end in a minute or two.
    "llama-60m": Shape(
        name="llama-60m", config="LlamaConfig",
        sizes={"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
               "intermediate_size": 1408, "vocab_size": 32000},
    ),
    # Layers that are one kernel each and few words: all of a GPU is filled and emptied twice a second.
    "bert-slim": Shape(
        name="bert-slim", config="BertConfig", masked=True,
        sizes={"num_hidden_layers": 24, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
               "vocab_size": 1024},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the memory it gets, and how many steps it is trained for."""

    shape: str
    card_gib: float
    """0: the whole GPU."""
    steps: int
    longest: int = 2048
    """Samples are cut to this many tokens."""

    @property
    def name(self) -> str:
        """The shape, and the GiB of a part of the GPU."""
        return f"{self.shape}/{self.card_gib:g}" if self.card_gib else self.shape


FULL = (
    Case("llama-1.1b", 0, 6), Case("llama-60m", 13, 500), Case("bert-slim", 0, 500, longest=512),
    Case("qwen2-0.5b", 0, 12), Case("llama-1.1b", 13, 500, longest=1024),
)  # fmt: skip
QUICK = (Case("llama-tiny", 0.5, 4, longest=256), Case("qwen2-tiny", 0.25, 4, longest=256))


@dataclass(frozen=True, kw_only=True, slots=True)
class FitBenchConfig:
    """What is measured and for how long."""

    device: str = "cuda"
    seconds: float = 240.0
    """For all cases; steps stop then, and it is said."""
    cases: tuple[Case, ...] = FULL


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one case came to."""

    shape: str
    card_gib: float
    cells: int
    """The budget."""
    fullest: int
    """Cells of the largest micro-batch that was run."""
    uncertainty: float
    probes: int
    probe_seconds: float
    steps: int
    steps_wanted: int
    seconds: float
    out_of_memory: int
    """Errors the guard had to survive: 0 is the aim."""
    allocation_retries: int
    """Times torch gave back its cache to find room: no error, but slow."""
    predicted_bytes: int
    """For the largest micro-batch that was run, before the run."""
    peak_bytes: int
    reserved_bytes: int
    """With the gaps of the allocator: what the GPU has lost to the process."""
    share_of_limit: float
    """The peak over the memory that was given."""
    share_reserved: float
    error: float
    """Predicted over real peak, minus 1."""
    tokens_per_second: float
    fit: dict[str, Any]


def run_case(case: Case, device: torch.device, *, seconds: float) -> Row:
    """Fit, then train at the budget for the steps asked for or as many as the time allows."""
    given = _limit(case, device)
    began = time.monotonic()
    engine, data = _open(SHAPES_HERE[case.shape], device, case.longest)
    limit = usable_bytes(given, device)
    config = TrainConfig(layout="packed")
    fit = fit_memory(engine, data, config, limit_bytes=limit)
    assert data.measured is not None
    lengths = data.measured.lengths
    cells = largest_cells(fit, Sizes(lengths), layout="packed", limit_bytes=limit)
    probed = time.monotonic()
    say(f"{case.shape}: cells={cells:,}, +-{fit.uncertainty:.2%}, {probed - began:.1f} s")
    left = seconds - (probed - began)
    steps, tokens, predicted, fullest = 0, 0, 0, 0
    with _counting(engine) as peak:
        for batches in _ahead(_steps(data, cells, case.steps)):
            shapes = [Sizes(np.array(batch.rows().lengths)).shape("packed") for batch in batches]
            predicted = max(predicted, *(fit.predict(*shape) for shape in shapes))
            fullest = max(fullest, *(shape[0] for shape in shapes))
            _train(engine, batches)
            steps, tokens = steps + 1, tokens + sum(shape[0] for shape in shapes)
            if time.monotonic() - probed > left:
                break
        _wait(device)
        took = time.monotonic() - probed
        peak_bytes, reserved, retries = peak()
    assert engine.guard is not None
    return Row(
        shape=case.shape, card_gib=given / GIB, cells=cells, fullest=fullest, uncertainty=fit.uncertainty,
        probes=len(fit.points), probe_seconds=probed - began, steps=steps, steps_wanted=case.steps, seconds=took,
        out_of_memory=engine.guard.recoveries, allocation_retries=retries, predicted_bytes=predicted,
        peak_bytes=peak_bytes, reserved_bytes=reserved, share_of_limit=peak_bytes / given,
        share_reserved=reserved / given, error=predicted / peak_bytes - 1, tokens_per_second=tokens / took,
        fit=fit.to_dict(),
    )  # fmt: skip


def _limit(case: Case, device: torch.device) -> int:
    """Bytes this process may have, before it has any."""
    gc.collect()
    if device.type != "cuda":
        return int(case.card_gib * GIB)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, case.card_gib * GIB / total) if case.card_gib else 1.0, device)
    return free_bytes_of(device)


def _open(shape: Shape, device: torch.device, longest: int) -> tuple[StepEngine, TrainData]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(shape, longest=longest, device=device.type, dtype=dtype)
    head = head_of(model)
    # A plan cuts its samples into equal micro-batches: with only a few of them, each would be far from full.
    lengths = np.minimum(example_lengths("chat", 100_000 if device.type == "cuda" else 500, seed=0), longest)
    random = np.random.default_rng(1)
    tokens = [random.integers(0, shape.sizes["vocab_size"], n) for n in lengths.tolist()]
    samples = [{"input_ids": ids, "labels": ids} for ids in tokens]
    data = TrainData(samples=samples, fields=head.fields, measured=Measured(lengths=lengths, found="given"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    groups = make_groups([Group(optimiser=optimiser)], model)
    guard = OomGuard(fields=head.fields, say=say)
    return StepEngine(
        model=model, objective=HeadObjective(head=head), groups=groups, device=device, guard=guard
    ), data  # fmt: skip


def _steps(data: TrainData, cells: int, number: int) -> Iterator[list[MicroBatch]]:
    """Steps of one and of two nearly full micro-batches in turn: the second meets the gradients of the first."""
    batches = _batches(data, cells)
    for step in range(number):
        yield [next(batches) for _ in range(1 + step % 2)]


def _batches(data: TrainData, cells: int) -> Iterator[MicroBatch]:
    """Packed micro-batches as training cuts them, of all samples together so that they are nearly full, for ever."""
    assert data.measured is not None
    lengths = data.measured.lengths
    for epoch in count():
        plan = build_plan(lengths, PlanConfig(layout="packed", cells=cells, samples_per_step=len(lengths)), epoch=epoch)
        for rows in (rows for step in range(plan.num_steps) for rows in plan.step(step)[0]):
            yield collate([data.samples[i] for i in rows.ids.tolist()], rows, data.fields)


def _ahead(steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """The same; the next step is made while the GPU works on this one."""
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, steps, None)
        while (batches := coming.result()) is not None:
            coming = maker.submit(next, steps, None)
            yield batches


def _train(engine: StepEngine, batches: list[MicroBatch]) -> None:
    counts = step_counts(batches, engine.objective, {}, device=engine.device)
    apply_update(engine, take_gradients(engine, batches, counts, epoch=0))


@contextmanager
def _counting(engine: StepEngine) -> Iterator[Callable[[], tuple[int, int, int]]]:
    """Asked at the end: the peak of memory, what the allocator held at most, and how often it had to look for room."""
    device = engine.device
    if device.type != "cuda":
        held = held_bytes([*engine.model.parameters(), *engine.model.buffers()])
        with CountStorages() as counted:
            yield lambda: (held + counted.peak_bytes, held + counted.peak_bytes, 0)
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    yield lambda: (
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        torch.cuda.memory_stats(device).get("num_alloc_retries", 0) - before,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def problems(rows: list[Row]) -> list[str]:
    """The figures that were missed."""
    found = []
    for row in rows:
        name = f"{row.shape} in {row.card_gib:.1f} GiB"
        checks = {
            f"the peak is {row.share_of_limit:.1%} of the memory": row.share_of_limit >= LEAST_SHARE,
            f"predicted and real peak differ by {row.error:+.1%}": abs(row.error) <= LARGEST_ERROR,
            f"memory ran out {row.out_of_memory} times": row.out_of_memory == 0,
            f"{row.steps} of {row.steps_wanted} steps were run": row.steps == row.steps_wanted,
        }
        found += [f"{name}: {what}" for what, is_right in checks.items() if not is_right]
    return found


def summary(row: Row) -> str:
    """One case in a line."""
    return (
        f"{row.shape} in {row.card_gib:.1f} GiB: {row.steps} of {row.steps_wanted} steps in {row.seconds:.1f} s, memory ran "
        f"out {row.out_of_memory} times (survived), peak {row.share_of_limit:.1%} of the memory "
        f"({row.share_reserved:.1%} reserved), predicted / real peak {row.predicted_bytes / row.peak_bytes:.4f}"
    )


def say(line: str) -> None:
    """Print at once, so that an interrupted run keeps what it has said."""
    print(line, flush=True)


def main() -> int:
    """Run all cases, print and write each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all cases; steps stop then, and it is said")
    parser.add_argument("--only", default="", help=f"cases with commas: {', '.join(case.name for case in FULL)}")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    known = {case.name: case for case in (QUICK if given.quick else FULL)}
    try:
        names = read_names(given.only, list(known), kind="case") or tuple(known)
    except ConfigError as error:
        parser.error(str(error))
    config = FitBenchConfig(device=given.device, seconds=given.seconds, cases=tuple(known[name] for name in names))
    return 1 if measure(config, out=given.out)["problems"] else 0


def measure(config: FitBenchConfig, *, out: Path | None) -> dict[str, Any]:
    """All cases; what was measured is written after each."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # a probe that does not fit says why
    device = torch.device(config.device, 0) if config.device == "cuda" else torch.device(config.device)
    began = time.monotonic()
    report: dict[str, Any] = {
        **origin(config, "transformers", command=command_line("benchmarks.scripts.fit_cuda")),
        "rows": [], "left_out": [], "problems": []
    }  # fmt: skip
    rows: list[Row] = []
    for case in config.cases:
        if time.monotonic() - began > config.seconds:
            report["left_out"].append(f"{case.name}: out of time")
            say(report["left_out"][-1])
            continue
        rows.append(run_case(case, device, seconds=config.seconds + began - time.monotonic()))
        report |= {"rows": [asdict(row) for row in rows], "problems": problems(rows)}
        say(summary(rows[-1]))
        keep_result(report, out)
    for row in rows:
        say(json.dumps({name: value for name, value in asdict(row).items() if name != "fit"}))
    say("\n".join([*map(summary, rows), *report["problems"]]) if report["problems"] else "all figures are reached")
    return report


if __name__ == "__main__":
    sys.exit(main())
