"""Judging edited pictures through the whole pipeline of vl_reward, by batch: the note's table of 270 images.

    python -m benchmarks vl_reward --device cpu --out docs/results/vl_reward_cpu.json
    PYTHONPATH=src python3 -m benchmarks.systems.vl_reward --device cuda --seconds 300 --out vl_reward_cuda.json

Pairs are read from a benchmark file and edited; then each way judges them as a run does: listing and planning, pictures
decoded and prepared in threads ahead of the model, a text for every pair, the strict parser, the journal. The judge has
random weights (on a GPU a Qwen3-VL of 8B parameters in bf16) and writes as many tokens as it may, so no answer holds a
score: the time is that of judging, the scores mean nothing. On a CPU a tiny model runs in fp32 on one thread and CPU
seconds count.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, origin
from benchmarks.scoring.workload import make_qwen
from benchmarks.systems.vl_reward_workload import Clock, clocked, make_pairs, turn_around
from benchmarks.training.timing import peak_gib, reset_peak_memory
from truebatch.generation.config import Generation
from truebatch.scoring.backends.transformers import model_backend
from truebatch.scoring.batch_plan import Limits, load_batches
from truebatch.scoring.readouts import Generate
from truebatch.scoring.runner import RunConfig
from truebatch.scoring.store.export import read_rows
from truebatch_systems.vl_reward.data.dataset import EditPair
from truebatch_systems.vl_reward.data.toy_pictures import PROMPTS
from truebatch_systems.vl_reward.editors import ScriptedEditor
from truebatch_systems.vl_reward.judge.tiny_judge import make_processor
from truebatch_systems.vl_reward.stages import SCORES, Judging, edit_all, judge_all_edits

Say = Callable[[str], None]
UNLIMITED = 10**7
SHARE = 0.85
"""Of the GPU's memory that the fitted budget may take."""
IN_THREADS = ("decode", "prepare")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardBench:
    """What is measured."""

    device: str = "cpu"
    is_tiny: bool = True
    pairs: int = 270
    """Those of the note's table."""
    sides: tuple[tuple[int, int], ...] = ((96, 96), (160, 96), (96, 160), (224, 160))
    most_pixels: int = 96 * 96
    new_tokens: int = 16
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    first: int | None = None
    """Pairs that are judged one by one; a batch of n judges n times as many, all at most. None: all, always."""
    cells: int | None = 16_384
    """The budget of the last row; None: fitted to the GPU's memory by the rows before it."""
    rows: int = 128
    """Most pairs of a batch of the last row: pictures of a batch are prepared while the one before is judged."""
    seconds: float = 600.0
    """Nothing begins after this time; what was left out is named."""


def make_config(*, device: str = "cpu", seconds: float | None = None, quick: bool = False) -> RewardBench:
    """Sizes for a CPU or a GPU; quick: a dry run with a tiny model anywhere."""
    if quick:
        return RewardBench(device=device, pairs=8, new_tokens=4, sizes=(1, 4), seconds=seconds or 60)
    if device == "cpu":
        return RewardBench(seconds=seconds or 600)
    return RewardBench(
        device=device, is_tiny=False, sides=((448, 448), (640, 448), (448, 640), (672, 672)), most_pixels=448 * 448,
        new_tokens=64, first=8, cells=None, seconds=seconds or 300,
    )  # fmt: skip


def run_reward_bench(config: RewardBench, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Measure all rows; the result is written after every one, ratios first."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    result: dict[str, Any] = {
        "ratios": {},
        "rows": [],
        "left_out": [],
        **origin(config, "transformers", command=command_line("benchmarks.systems.vl_reward")),
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, Path(folder), result, say)
        for size in config.sizes:
            bench.row("one by one" if size == 1 else f"batch {size}", size, bench.number(size), UNLIMITED)
            keep_result(result, out)
        cells = config.cells or bench.fitted_cells()
        bench.row("a budget of cells" if config.cells else "fitted budget", config.rows, config.pairs, cells)
        if config.device == "cuda":
            bench.compiled_row("fitted budget, compiled", config.rows, config.pairs, cells)
    result["seconds"] = time.monotonic() - bench.began
    keep_result(result, out)
    return result


class Bench:
    """The measurement as it goes: one model, one set of edited pictures, a row a way."""

    def __init__(self, config: RewardBench, folder: Path, result: dict[str, Any], say: Say) -> None:
        self.config, self.folder, self.result, self.say = config, folder, result, say
        self.began = time.monotonic()
        self.device = torch.device(config.device)
        self.model = make_qwen(self.device, is_tiny=config.is_tiny)
        _without_end(self.model)
        vocabulary = int(self.model.config.text_config.vocab_size)  # type: ignore[union-attr, arg-type]
        self.processor = make_processor(vocabulary, most_pixels=config.most_pixels)
        self.pairs = make_pairs(folder, config.pairs, config.sides)
        edit_all(self.pairs, [ScriptedEditor(turn_around)], folder, seed=0, how=RunConfig())
        self.is_compiled = False
        self.texts: dict[str, Any] = {}
        self.points: list[tuple[int, float]] = []
        self.resident = peak_gib(self.device)
        self.say(f"ready in {time.monotonic() - self.began:.1f} s: {len(self.pairs)} edited pairs")
        if config.device == "cuda":
            self._judge(self.pairs[:2], Limits(cells=UNLIMITED, rows=2))  # the first run is slow for reasons of its own

    def number(self, size: int) -> int:
        """Pairs that are judged in batches of this size."""
        every = self.config.pairs
        return every if self.config.first is None else min(every, self.config.first * size)

    def compiled_row(self, way: str, size: int, number: int, cells: int) -> None:
        """The same with compiled layers, for which a first run is not timed: it compiles both lengths of rows."""
        self.is_compiled = True
        if time.monotonic() - self.began <= self.config.seconds:
            self._judge(self.pairs[: min(number, size)], Limits(cells=cells, rows=size))
        self.row(way, size, number, cells)

    def row(self, way: str, size: int, number: int, cells: int) -> None:
        """Judge so many pairs in one way, and say what it took."""
        if time.monotonic() - self.began > self.config.seconds:
            self.result["left_out"].append(way)
            return
        reset_peak_memory(self.device)
        clock, took, rows, widest = self._judge(self.pairs[:number], Limits(cells=cells, rows=size))
        peak = peak_gib(self.device)
        self.points.append((widest, peak))
        rate = number / took
        first = self.result["rows"][0]["samples_per_second"] if self.result["rows"] else rate
        self.result["rows"].append(
            {
                "way": way, "batch_size": size, "cells": cells if cells < UNLIMITED else None, "samples": number,
                "samples_per_second": rate, "speedup": rate / first, "minutes_for_270": 270 / rate / 60,
                "peak_gib": peak, "largest_batch_cells": widest, "model_share": clock.seconds["model"] / took,
                **self._equal(rows),
                "milliseconds_a_sample": self._parts(clock, took, number), "statuses": _statuses(rows),
            }
        )  # fmt: skip
        self.result["ratios"][f"{way} / one by one"] = rate / first
        self.say(_line(self.result["rows"][-1]))

    def fitted_cells(self) -> int:
        """The most cells of a batch by a line through what the rows so far took; at least those of the last row."""
        least = max((cells for cells, _ in self.points), default=1)
        if len(self.points) < 2 or self.device.type != "cuda":
            return least
        (few, low), (many, high) = self.points[-2], self.points[-1]
        price = max(high - low, 1e-6) / max(many - few, 1)
        total = torch.cuda.get_device_properties(self.device).total_memory / 2**30
        fitted = max(least, int(many + (SHARE * total - high) / price))
        self.result["fitted"] = {"cells": fitted, "gib_per_1000_cells": 1000 * price, "resident_gib": self.resident}
        return fitted

    def _judge(self, pairs: Sequence[EditPair], limits: Limits) -> tuple[Clock, float, dict[str, Any], int]:
        """One run of the second stage in a journal of its own: its clock, its seconds, its rows, its widest batch."""
        is_card = self.device.type == "cuda"
        clock = Clock(now=time.perf_counter if is_card else time.thread_time)
        now = time.perf_counter if is_card else time.process_time
        readout = Generate(Generation(temperature=0.0, max_new_tokens=self.config.new_tokens))
        judging = Judging(prompts=PROMPTS, limits=limits)
        with clocked(clock):
            began = now()
            judge_all_edits(
                pairs,
                lambda: model_backend(self.model, self.processor, readout, limits, compiled=self.is_compiled),
                self.folder,
                judging,
                RunConfig(),
            )
            took = now() - began
        scores = self.folder / SCORES
        plan = load_batches(scores)
        widest = max(len(batch) * max((plan.tokens or {})[key] for key in batch) for batch in plan.batches)
        rows = {row["id"]: row for row in read_rows(scores)}
        shutil.rmtree(scores)
        return clock, took, rows, widest

    def _equal(self, rows: dict[str, Any]) -> dict[str, int]:
        texts = {name: row["output"].get("text") for name, row in rows.items()}
        self.texts = self.texts or texts
        both = texts.keys() & self.texts.keys()
        return {"equal": sum(texts[name] == self.texts[name] for name in both), "compared": len(both)}

    def _parts(self, clock: Clock, took: float, number: int) -> dict[str, float]:
        """Milliseconds of each part, and of what is left: on a GPU decoding and preparing go on beside the model."""
        own = clock.own()
        beside = IN_THREADS if self.device.type == "cuda" else ()
        own["other"] = took - sum(seconds for part, seconds in own.items() if part not in beside)
        return {part: 1000 * seconds / number for part, seconds in own.items()}


def _without_end(model: Any) -> None:
    """No token ends an answer, so that all are equally long: random weights would end them anywhere."""
    model.generation_config.eos_token_id = model.config.eos_token_id = None


def _statuses(rows: dict[str, Any]) -> dict[str, int]:
    return dict(Counter(row["kind"] or row["status"] for row in rows.values()))


def _line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {value:.1f}" for name, value in row["milliseconds_a_sample"].items())
    return (
        f"{row['way']:18} {row['samples']:4} pairs {row['samples_per_second']:8.2f} a second {row['speedup']:6.2f}x "
        f"{row['peak_gib']:6.1f} GiB {row['equal']}/{row['compared']} equal; ms a pair: {parts}"
    )


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few pairs: a dry run")
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    args = parser.parse_args()
    run_reward_bench(make_config(device=args.device, seconds=args.seconds, quick=args.quick), out=args.out, say=_say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
