"""The whole training step of vlm_pruning by batch, against even batches; memory; generation with tokens removed.

    python -m truebatch.bench.vlm_pruning --device cpu --out docs/results/vlm_pruning_cpu.json
    PYTHONPATH=src python3 -m truebatch.bench.vlm_pruning --device cuda --seconds 140 --out vlm_pruning_cuda.json

One process, one model with random weights (on a card the shape of LLaVA-1.5-7B, bf16), the same samples for every way.
A step is forward and backward of both ways through the decoder, and the update of both optimisers; `steps` are timed
on micro-batches made before, `with_loading` with images read, sized and copied by the loader's workers meanwhile. All
ways have one update for every `samples_per_step` samples. Even batches through the same modules are the limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truebatch.bench.keeping import keep_result
from truebatch.bench.training_timing import GIB, forget_models, peak_gib, reset_peak_memory, time_once
from truebatch.bench.vlm_pruning_work import (
    TwoWholeForwards,
    Work,
    collected,
    engine_of,
    make_samples,
    make_work,
    planned_steps,
    preprocessing_seconds,
)
from truebatch.errors import ConfigError
from truebatch.generation.decoding import collect, generate_tokens
from truebatch.generation.settings import Generation
from truebatch.systems.vlm_pruning.accounting import account_of
from truebatch.systems.vlm_pruning.generation import open_decoder, sample_prompts
from truebatch.systems.vlm_pruning.measuring import measure_tokens
from truebatch.systems.vlm_pruning.model import PrunedVLM
from truebatch.tensors.loader import LoadedStep
from truebatch.training.outofmemory import free_memory, is_out_of_memory
from truebatch.training.step import Engine, apply_update, step_counts, take_gradients

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningBenchConfig:
    """What is measured and for how long."""

    device: str = "cpu"
    is_large: bool = False
    samples: int = 32
    samples_per_step: int = 16
    note_batch: int = 8
    """The batch the note recommends."""
    fitted: int | None = 16
    """Samples of the fitted budget; None measures what the card holds."""
    most: int = 20
    """The fitted budget is not tried beyond so many samples: a card is busy long before, and rows are filled better."""
    one_by_one: int = 16
    """Samples of the rows that run one by one."""
    workers: int = 0
    way_seconds: float = 3.0
    new_tokens: int = 8
    generated: int = 8
    """Prompts of the generation rows."""
    seconds: float = 600.0
    """Nothing begins after this time; what was left out is named."""


@dataclass(kw_only=True, slots=True)
class Row:
    """One way to run the same step."""

    way: str
    samples_per_second: float
    tokens_per_second: float
    """Tokens that are real."""
    peak_gib: float
    fill: float
    micro_batches: int
    rounds: list[float]


def run_pruning(config: PruningBenchConfig, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Measure all rows; the result is written to `out` after every one, ratios first."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    bench = Bench(config, out, say)
    bench.training_rows()
    bench.further_rows()
    bench.generation_rows()
    bench.loading_rows()
    bench.result["seconds"] = time.monotonic() - bench.began
    bench.write()
    for name, value in bench.result["ratios"].items():
        say(f"{name}: {value:.3f}")
    return bench.result


class Bench:
    """The measurement as it goes."""

    def __init__(self, config: PruningBenchConfig, out: Path | None, say: Say) -> None:
        self.config, self.out, self.say = config, out, say
        self.began = time.monotonic()
        self.device = torch.device(config.device)
        self.result: dict[str, Any] = {"ratios": {}, "rows": [], "left_out": [], **_about(config)}
        self.work = make_work(self.device, is_large=config.is_large, number=config.samples)
        learned = sum(p.numel() for p in self.work.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in self.work.model.backbone.parameters())
        self.result["parameters"] = {"frozen": frozen, "trained": learned}
        say(f"built in {time.monotonic() - self.began:.1f} s: {frozen / 1e9:.2f}B frozen, {learned / 1e6:.1f}M trained")

    def training_rows(self) -> None:
        """One by one, the note's batch, the fitted budget, and even batches of the same number."""
        config = self.config
        self.row("one by one", self._few(), samples=1)
        note = self.row(f"batch {config.note_batch}", self.work, samples=config.note_batch)
        fitted = config.fitted or self._fit(note)
        self.result["fitted_samples"] = fitted
        width = int(statistics.mean(self.work.lengths))
        self.row("fitted budget", self.work, cells=fitted * width)
        self.row("even batches (the limit)", self._even(width), samples=fitted)

    def further_rows(self) -> None:
        """What else a step can save: the second forward as a whole or in part."""
        cells = self.result.get("fitted_samples", 1) * int(statistics.mean(self.work.lengths))
        model = self.work.model
        twice = TwoWholeForwards(model.backbone, model.family, model.method).to(self.device)
        self.row("fitted budget, two whole forwards", self._with(twice), cells=cells)
        alone = PrunedVLM(model.backbone, model.family, replace(model.method, teacher="none")).to(self.device)
        self.row("fitted budget, no teacher", self._with(alone), cells=cells)
        self.result["preprocessing_seconds_per_sample"] = preprocessing_seconds(self.work, min(8, self.config.samples))
        self.say(f"preprocessing: {json.dumps(self.result['preprocessing_seconds_per_sample'])}")
        self.write()

    def generation_rows(self) -> None:
        """The same prompts with all vision tokens and with the budget's share of them."""
        config, work = self.config, self.work
        model = PrunedVLM(work.model.backbone, work.model.family, replace(work.model.method, choice="top_k"))
        model.to(self.device).eval()
        prompts = sample_prompts(work.encoder, work.samples[: config.generated])
        settings = Generation(max_new_tokens=config.new_tokens, temperature=0.0)
        rows: dict[str, Any] = {}
        for mode in ("origin", "hard"):
            if self._is_over(f"generation, {mode}"):
                continue
            decoder = open_decoder(model, work.encoder, mode=mode, ends=[10**6])
            reset_peak_memory(self.device)

            def generate(decoder: Any = decoder) -> None:
                collect(generate_tokens(decoder, prompts, settings, rows=len(prompts)), len(prompts))

            def prefill(decoder: Any = decoder) -> None:
                decoder.start(prompts)

            generate()
            whole = statistics.median(time_once(generate, self.device) for _ in range(3))
            first = statistics.median(time_once(prefill, self.device) for _ in range(3))
            text = [len(p.ids) - int(p.inputs["is_vision"].sum()) for p in prompts]
            account = account_of(decoder.start(prompts)[1], model.backbone, text).figures()
            rows[mode] = {
                "samples_per_second": len(prompts) / whole, "prefill_seconds": first, "seconds": whole,
                "peak_gib": peak_gib(self.device), **account,
            }  # fmt: skip
            self.say(f"generation, {mode}: {len(prompts) / whole:.2f} samples/s, prefill {first:.3f} s, "
                     f"{account['hard_avg_tokens']:.0f} vision tokens a layer")  # fmt: skip
            self.result["generation"] = rows
            self.write()

    def loading_rows(self) -> None:
        """Again with images read, sized and copied while the card works; the first step, which waits, does not count."""
        cells = self.result.get("fitted_samples", 1) * int(statistics.mean(self.work.lengths))
        self.loading_row("fitted budget, with loading", self.work, cells=cells)
        self.loading_row("one by one, with loading", self._few(), samples=1)

    def row(self, way: str, work: Work, *, samples: int | None = None, cells: int | None = None) -> Row | None:
        """Time one way on micro-batches made before; None if time is over or memory did not do."""
        if self._is_over(way):
            return None
        made = collected(
            planned_steps(work, samples=samples, cells=cells, per_step=self.config.samples_per_step, workers=0)
        )
        widest = max((b for step in made for b in step.batches), key=lambda b: b.segments.num_cells)
        took: list[float] = []
        said = ""
        try:
            _run_steps(work.engine, [LoadedStep(0, (widest,), {})])  # warm-up
            reset_peak_memory(self.device)
            began = time.monotonic()
            while len(took) < 2 or (len(took) < 7 and time.monotonic() - began < self.config.way_seconds):
                took.append(time_once(lambda: _run_steps(work.engine, made), self.device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = f"{way}: out of memory"
        if said:
            free_memory(self.device)
            self.result["left_out"].append(said)
            self.say(said)
            return None
        number = sum(b.num_samples for s in made for b in s.batches)
        return self._add(_row(way, made, statistics.median(took) / number, peak_gib(self.device), took))

    def loading_row(self, way: str, work: Work, *, samples: int | None = None, cells: int | None = None) -> None:
        """Time the steps behind the first by the clock: workers are other processes."""
        if self._is_over(way):
            return
        longer = replace(work, samples=work.samples * 3, lengths=np.tile(work.lengths, 3))
        steps = planned_steps(
            longer, samples=samples, cells=cells, per_step=len(work.samples), workers=self.config.workers
        )
        done: list[LoadedStep] = []
        began = time.perf_counter()
        for step in steps:
            _run_steps(work.engine, [step])
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter() if not done else began
            done.append(step)
        took = time.perf_counter() - began
        number = sum(b.num_samples for s in done[1:] for b in s.batches)
        self._add(_row(way, done[1:], took / number, peak_gib(self.device), [took]))

    def _add(self, row: Row) -> Row:
        self.result["rows"].append(asdict(row))
        self.result["ratios"] = ratios(self.result["rows"], is_card=self.device.type == "cuda")
        self.say(f"{row.way}: {row.samples_per_second:.2f} samples/s, {row.peak_gib:.1f} GiB, fill {row.fill:.3f}")
        self.write()
        return row

    def _few(self) -> Work:
        number = self.config.one_by_one
        return replace(self.work, samples=self.work.samples[:number], lengths=self.work.lengths[:number])

    def _fit(self, note: Row | None) -> int:
        """Samples that fill four fifths of the card, from the memory of the note's batch; at most `most`."""
        if note is None or self.device.type != "cuda":
            return self.config.note_batch
        whole = torch.cuda.get_device_properties(self.device).total_memory / GIB
        still = sum(p.numel() * p.element_size() for p in self.work.model.parameters()) / GIB
        each = (note.peak_gib - still) / self.config.note_batch
        return max(1, min(self.config.most, int((0.8 * whole - still) / each)))

    def _even(self, width: int) -> Work:
        """Samples of one length, as near to the mean as whole words allow."""
        shortest = measure_tokens(self.work.encoder, make_samples(1, even=1))[0]
        samples = make_samples(self.config.samples, even=max(1, width - int(shortest) + 1))
        return replace(self.work, samples=samples, lengths=measure_tokens(self.work.encoder, samples))

    def _with(self, model: PrunedVLM) -> Work:
        return replace(self.work, model=model, engine=engine_of(model, self.device))

    def _is_over(self, what: str) -> bool:
        if time.monotonic() - self.began > self.config.seconds:
            self.result["left_out"].append(what)
            self.write()
            return True
        return False

    def write(self) -> None:
        """The result so far."""
        keep_result(self.result, self.out)


def _run_steps(engine: Engine, steps: Any) -> None:
    """The training room's own step: gradients of all micro-batches, then the updates."""
    for step in steps:
        counts = step_counts(step.batches, engine.objective, step.counts, device=engine.device)
        apply_update(engine, take_gradients(engine, step.batches, counts, epoch=0))


def _row(way: str, steps: Sequence[LoadedStep], seconds: float, peak: float, took: list[float]) -> Row:
    batches = [batch for step in steps for batch in step.batches]
    tokens = sum(sum(batch.rows().lengths) for batch in batches)
    cells = sum(batch.rows().segments.num_cells for batch in batches)
    number = sum(batch.num_samples for batch in batches)
    return Row(
        way=way, samples_per_second=1 / seconds, tokens_per_second=tokens / number / seconds, peak_gib=peak,
        fill=tokens / cells, micro_batches=len(batches), rounds=took,
    )  # fmt: skip


def ratios(rows: Sequence[dict[str, Any]], *, is_card: bool = False) -> dict[str, float]:
    """What the rows say, first things first; tokens that are real are compared, so that lengths do not matter.

    Loading is compared on a card only: on a CPU it is timed by the clock and everything else in CPU seconds.
    """
    rate = {row["way"]: row["tokens_per_second"] for row in rows}
    memory = {row["way"]: row["peak_gib"] for row in rows}
    batch = next((way for way in rate if way.startswith("batch ")), "")
    pairs = {
        "fitted budget / even batches": ("fitted budget", "even batches (the limit)"),
        "fitted budget / one by one": ("fitted budget", "one by one"),
        f"{batch} / one by one": (batch, "one by one"),
        "with loading, fitted / one by one": ("fitted budget, with loading", "one by one, with loading"),
        "one forward shared / two whole forwards": ("fitted budget", "fitted budget, two whole forwards"),
        "no teacher / two whole forwards": ("fitted budget, no teacher", "fitted budget, two whole forwards"),
    }
    if is_card:
        pairs["with loading / without"] = ("fitted budget, with loading", "fitted budget")
    found = {name: rate[a] / rate[b] for name, (a, b) in pairs.items() if a in rate and b in rate}
    if batch and memory.get("one by one"):
        found[f"memory, {batch} / one by one"] = memory[batch] / memory["one by one"]
    return found


def _about(config: PruningBenchConfig) -> dict[str, Any]:
    is_card = config.device == "cuda"
    return {
        "command": shlex.join(["python", "-m", "truebatch.bench.vlm_pruning", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if is_card else f"{platform.machine()} CPU, one thread",
        "versions": {
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "config": asdict(config),
    }


def make_config(*, device: str = "cpu", seconds: float | None = None, quick: bool = False) -> PruningBenchConfig:
    """The sizes for a device; `quick` is a dry run."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no card here", seen="torch.cuda.is_available() is False", do="use --device cpu")
    sizes: dict[str, Any] = {}
    if device == "cuda":
        sizes = {
            "is_large": True, "samples": 64, "samples_per_step": 64, "note_batch": 10, "fitted": None, "workers": 8,
            "way_seconds": 5.0, "one_by_one": 20, "new_tokens": 32, "generated": 32, "seconds": 130.0,
        }  # fmt: skip
    if quick:
        sizes |= {
            "is_large": False, "samples": 8, "samples_per_step": 4, "note_batch": 2, "fitted": 4, "way_seconds": 0.0,
            "new_tokens": 3, "generated": 2, "one_by_one": 4,
        }  # fmt: skip
    if seconds is not None:
        sizes["seconds"] = seconds
    return PruningBenchConfig(device=device, **sizes)


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few samples: a dry run")
    args = parser.parse_args()
    run_pruning(make_config(device=args.device, seconds=args.seconds, quick=args.quick), out=args.out, say=_say)
    forget_models()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
