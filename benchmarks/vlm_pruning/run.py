"""The whole training step of vlm_pruning by batch, against even batches; memory; generation with tokens removed.

    python -m benchmarks vlm_pruning --device cpu --out docs/results/vlm_pruning_cpu.json
    PYTHONPATH=src python3 -m benchmarks.vlm_pruning.run --device cuda --seconds 185 --out vlm_pruning_cuda.json
    PYTHONPATH=src python3 -m benchmarks.vlm_pruning.run --device cuda --only loading --fitted 20 --out loading.json

One process, one model with random weights (on a GPU the shape of LLaVA-1.5-7B, bf16), the same samples for every way.
A step is forward and backward of both ways through the decoder, and the update of both optimisers. Rows without a word
are timed on micro-batches made before; rows "with loading" have images read, sized and copied by the loader's workers
meanwhile; rows in "the note's way" process images inside the step with transformers' own processor, and run the
unpruned decoder as a whole again. All ways have one update for every `samples_per_step` samples. Even batches through
the same modules and kernels are the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.choices import read_names
from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, origin
from benchmarks.training.timing import GIB, forget_models, peak_gib, reset_peak_memory, time_once
from benchmarks.vlm_pruning.generation import generation_row
from benchmarks.vlm_pruning.rows import (
    ALONE,
    EVEN,
    FITTED,
    LOADED,
    NOTE_BATCH,
    NOTE_ONE,
    ONE,
    TWICE,
    Row,
    make_row,
    ratios,
)
from benchmarks.vlm_pruning.workload import (
    Before,
    TwoWholeForwards,
    Work,
    engine_of,
    make_samples,
    make_work,
    note_images,
    planned_steps,
    preprocessing_seconds,
    repeated,
    run_steps,
    widest_and_narrowest,
)
from truebatch.data.loader import LoadedStep
from truebatch.errors import ConfigError
from truebatch.training.memory.oom import free_memory, is_out_of_memory
from truebatch_systems.vlm_pruning.config import EvalMode
from truebatch_systems.vlm_pruning.data.encode import measure_tokens
from truebatch_systems.vlm_pruning.model.model import PrunedVLM

Say = Callable[[str], None]
PARTS = ("training", "loading", "generation", "further", "note")
"""What is measured, in this order."""
LOADED_STEPS = 3
"""Steps of a row with loading at least; the first waits for the workers and does not count."""


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
    """Samples of the fitted budget; None measures what the GPU holds."""
    most: int = 20
    """The fitted budget is not tried beyond so many samples: a GPU is busy long before, and rows are filled better."""
    one_by_one: int = 16
    """Samples of the rows that run one by one."""
    workers: int = 0
    way_seconds: float = 3.0
    least_rounds: int = 2
    new_tokens: int = 8
    generated: int = 8
    """Prompts of the generation rows."""
    seconds: float = 600.0
    """Nothing begins after this time; what was left out is named."""
    parts: tuple[str, ...] = PARTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a step is cut into micro-batches."""

    samples: int | None = None
    cells: int | None = None


def run_pruning(config: PruningBenchConfig, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Measure the rows of all parts; the result is written to `out` after every one, ratios first."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    bench = Bench(config, out, say)
    measure: dict[str, Callable[[], None]] = {
        "training": bench.training_rows, "loading": bench.loading_rows, "generation": bench.generation_rows,
        "further": bench.further_rows, "note": bench.note_rows,
    }  # fmt: skip
    for part in config.parts:
        measure[part]()
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
        about = origin(config, "transformers", command=command_line("benchmarks.vlm_pruning.run"))
        self.result: dict[str, Any] = {"ratios": {}, "rows": [], "left_out": [], **about, "parts": list(config.parts)}
        self.work = make_work(self.device, is_large=config.is_large, number=config.samples)
        self.width = int(statistics.mean(self.work.lengths))
        self.fitted = config.fitted or config.note_batch
        if config.fitted:
            self.result["fitted_samples"] = config.fitted
        learned = sum(p.numel() for p in self.work.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in self.work.model.backbone.parameters())
        self.result["parameters"] = {"frozen": frozen, "trained": learned}
        say(f"built in {time.monotonic() - self.began:.1f} s: {frozen / 1e9:.2f}B frozen, {learned / 1e6:.1f}M trained")

    def training_rows(self) -> None:
        """One by one, the note's batch, the fitted budget, and even batches of the same number."""
        config = self.config
        self.row(ONE, self._few(), Cut(samples=1))
        note = self.row(f"batch {config.note_batch}", self.work, Cut(samples=config.note_batch))
        self.fitted = config.fitted or self._fit(note)
        self.result["fitted_samples"] = self.fitted
        self.row(FITTED, self.work, self._fitted_cut())
        self.row(EVEN, self._even(), Cut(samples=self.fitted))

    def loading_rows(self) -> None:
        """Again with images read, sized and copied while the GPU works; the first step, which waits, does not count."""
        self.loading_row(FITTED, self.work, self._fitted_cut())
        self.loading_row(EVEN, self._even(), Cut(samples=self.fitted))
        self.loading_row(f"batch {self.config.note_batch}", self.work, Cut(samples=self.config.note_batch))
        self.loading_row(ONE, self._few(), Cut(samples=1))

    def generation_rows(self) -> None:
        """The same prompts with all vision tokens and with the budget's share of them."""
        config, work = self.config, self.work
        model = PrunedVLM(work.model.backbone, work.model.family, replace(work.model.method, choice="top_k"))
        model.to(self.device).eval()
        rows: dict[str, Any] = self.result.setdefault("generation", {})
        modes: tuple[EvalMode, ...] = ("origin", "hard")
        for mode in modes:
            if self._is_over(f"generation, {mode}"):
                continue
            row = generation_row(
                model, work, mode, prompts=config.generated, new_tokens=config.new_tokens, device=self.device
            )
            rows[mode] = row
            if len(rows) > 1:
                for name in ("seconds", "prefill_seconds", "seconds_per_new_token", "flops", "cache_bytes"):
                    self.result["ratios"][f"generation, {name}: hard / origin"] = row[name] / rows["origin"][name]
            self.say(f"generation, {mode}: {row['samples_per_second']:.2f} samples/s, prefill {row['prefill_seconds']:.3f} s, "
                     f"{row['hard_avg_tokens']:.0f} vision tokens a layer")  # fmt: skip
            self.write()

    def further_rows(self) -> None:
        """What else a step can save: the second forward as a whole or in part."""
        model = self.work.model
        twice = TwoWholeForwards(model.backbone, model.family, model.method).to(self.device)
        self.row(TWICE, self._with(twice), self._fitted_cut())
        alone = PrunedVLM(model.backbone, model.family, replace(model.method, teacher="none")).to(self.device)
        self.row(ALONE, self._with(alone), self._fitted_cut())
        self.result["preprocessing_seconds_per_sample"] = preprocessing_seconds(self.work, min(8, self.config.samples))
        self.say(f"preprocessing: {json.dumps(self.result['preprocessing_seconds_per_sample'])}")
        self.write()

    def note_rows(self) -> None:
        """The note's own step: images inside the step, twice; both ways through the whole decoder."""
        model = self.work.model
        twice = TwoWholeForwards(model.backbone, model.family, model.method).to(self.device)
        work = self._with(twice)
        few = replace(self._few(), model=work.model, engine=work.engine)
        self.row(NOTE_BATCH, work, Cut(samples=self.config.note_batch), before=note_images(work))
        self.row(NOTE_ONE, few, Cut(samples=1), before=note_images(few))

    def row(self, way: str, work: Work, cut: Cut, *, before: Before | None = None) -> Row | None:
        """Time one way on micro-batches made before; None if time is over or memory did not do."""
        if self._is_over(way):
            return None
        made: list[LoadedStep] = list(
            planned_steps(work, samples=cut.samples, cells=cut.cells, per_step=self.config.samples_per_step, workers=0)
        )
        took: list[float] = []
        is_short = False
        try:
            run_steps(work.engine, widest_and_narrowest(made), before)
            reset_peak_memory(self.device)
            began = time.monotonic()
            while len(took) < self.config.least_rounds or (
                len(took) < 7 and time.monotonic() - began < self.config.way_seconds
            ):
                took.append(time_once(lambda: run_steps(work.engine, made, before), self.device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            is_short = True
        if is_short:
            free_memory(self.device)
            self._leave_out(f"{way}: out of memory")
            return None
        number = sum(b.num_samples for s in made for b in s.batches)
        return self._add(make_row(way, made, statistics.median(took) / number, peak_gib(self.device), took))

    def loading_row(self, way: str, work: Work, cut: Cut) -> None:
        """Time the steps behind the first by the clock: workers are other processes."""
        if self._is_over(way + LOADED):
            return
        per_step = min(self.config.samples_per_step, len(work.samples))
        longer = repeated(work, LOADED_STEPS * per_step)
        steps = planned_steps(
            longer, samples=cut.samples, cells=cut.cells, per_step=per_step, workers=self.config.workers
        )
        done: list[LoadedStep] = []
        reset_peak_memory(self.device)
        began = time.perf_counter()
        for step in steps:
            run_steps(work.engine, [step])
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter() if not done else began
            done.append(step)
        took = time.perf_counter() - began
        number = sum(b.num_samples for s in done[1:] for b in s.batches)
        self._add(make_row(way + LOADED, done[1:], took / number, peak_gib(self.device), [took]))

    def _add(self, row: Row) -> Row:
        self.result["rows"].append(asdict(row))
        self.result["ratios"] |= ratios(self.result["rows"], is_card=self.device.type == "cuda")
        self.say(f"{row.way}: {row.samples_per_second:.2f} samples/s, {row.peak_gib:.1f} GiB, fill {row.fill:.3f}")
        self.write()
        return row

    def _few(self) -> Work:
        number = self.config.one_by_one
        return replace(self.work, samples=self.work.samples[:number], lengths=self.work.lengths[:number])

    def _fitted_cut(self) -> Cut:
        return Cut(cells=max(self.fitted * self.width, int(max(self.work.lengths))))

    def _fit(self, note: Row | None) -> int:
        """Samples that fill four fifths of the GPU, from the memory of the note's batch; at most `most`."""
        if note is None or self.device.type != "cuda":
            return self.config.note_batch
        whole = torch.cuda.get_device_properties(self.device).total_memory / GIB
        still = sum(p.numel() * p.element_size() for p in self.work.model.parameters()) / GIB
        each = (note.peak_gib - still) / self.config.note_batch
        return max(1, min(self.config.most, int((0.8 * whole - still) / each)))

    def _even(self) -> Work:
        """Samples of one length, as near to the mean as whole words allow."""
        shortest = measure_tokens(self.work.encoder, make_samples(1, even=1))[0]
        samples = make_samples(self.config.samples, even=max(1, self.width - int(shortest) + 1))
        return replace(self.work, samples=samples, lengths=measure_tokens(self.work.encoder, samples))

    def _with(self, model: PrunedVLM) -> Work:
        return replace(self.work, model=model, engine=engine_of(model, self.device))

    def _is_over(self, what: str) -> bool:
        if time.monotonic() - self.began > self.config.seconds:
            self._leave_out(f"{what}: no time")
            return True
        return False

    def _leave_out(self, what: str) -> None:
        self.result["left_out"].append(what)
        self.say(what)
        self.write()

    def write(self) -> None:
        """The result so far."""
        keep_result(self.result, self.out)


def make_config(
    *, device: str = "cpu", seconds: float | None = None, quick: bool = False, only: str = "", fitted: int | None = None
) -> PruningBenchConfig:
    """The sizes for a device; `quick` is a dry run, `only` names parts with commas, `fitted` the samples of the budget."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no GPU here", seen="torch.cuda.is_available() is False", do="use --device cpu")
    sizes: dict[str, Any] = {}
    if device == "cuda":
        sizes = {
            "is_large": True, "samples": 64, "samples_per_step": 64, "note_batch": 10, "fitted": None, "workers": 8,
            "way_seconds": 5.0, "one_by_one": 20, "new_tokens": 20, "generated": 64, "seconds": 185.0, "least_rounds": 3,
        }  # fmt: skip
    if quick:
        sizes |= {
            "is_large": False, "samples": 8, "samples_per_step": 4, "note_batch": 2, "fitted": 4, "way_seconds": 0.0,
            "new_tokens": 3, "generated": 2, "one_by_one": 4, "least_rounds": 1,
        }  # fmt: skip
    if seconds is not None:
        sizes["seconds"] = seconds
    if fitted is not None:
        sizes["fitted"] = fitted
    config = PruningBenchConfig(device=device, **sizes, parts=read_names(only, PARTS, kind="part") or PARTS)
    refuse_unfitted(config)
    return config


def refuse_unfitted(config: PruningBenchConfig) -> None:
    """A fitted budget is found by the training rows, or given."""
    if config.fitted is not None and config.fitted < 1:
        raise ConfigError("a budget holds a sample at least", seen=f"--fitted {config.fitted}", do="use 1 or more")
    needing = [part for part in config.parts if part in ("loading", "further")]
    if config.fitted is None and needing and "training" not in config.parts:
        raise ConfigError(
            f"{' and '.join(needing)} needs the number of samples that training rows find",
            seen=f"--only {','.join(config.parts)} without --fitted",
            do="give --fitted N, the fitted_samples of an earlier result, or measure training too",
        )


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few samples: a dry run")
    parser.add_argument("--only", default="", help=f"parts with commas: {', '.join(PARTS)}")
    parser.add_argument(
        "--fitted", type=int, default=None, help="samples of the fitted budget, instead of finding them"
    )
    args = parser.parse_args()
    config = make_config(
        device=args.device, seconds=args.seconds, quick=args.quick, only=args.only, fitted=args.fitted
    )  # fmt: skip
    run_pruning(config, out=args.out, say=_say)
    forget_models()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
