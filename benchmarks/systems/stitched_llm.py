"""Training speed of a stitched model on ragged text: the note's recommended settings against packed rows.

    python -m benchmarks stitched_llm --device cpu --out docs/results/stitched_llm_cpu.json
    python -m benchmarks stitched_llm --device cuda --seconds 150 --out stitched_llm_cuda.json

The same model, samples and process for all ways. Donors have random weights and the shapes of Qwen2.5-0.5B and 1.5B (on
a CPU tiny ones). Forward, backward and the update of the adapter are timed over the same micro-batches; the median
round counts. On a CPU one thread runs, and its CPU seconds count.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, today
from benchmarks.systems.stitched_llm_workload import (
    TINY_SIZES,
    StitchedBenchConfig,
    build_stitched,
    make_samples,
    padded_shares,
    slots_of,
)
from benchmarks.training.methods import Way, all_ways
from benchmarks.training.timing import GIB, forget_models, peak_gib, pin_batch, reset_peak_memory, time_once
from benchmarks.training.workload import Part, Work, typical_parts
from truebatch.errors import ConfigError
from truebatch.hf.attention.packed import use_packed_attention
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import packed_row, padded_rows
from truebatch_systems.stitched_llm.train.trainable_parts import store_donors, stored_bytes

NOTE_SAMPLES = 4
"""Samples of one update in the note: batch 1, accumulation 4."""


@dataclass(kw_only=True, slots=True)
class Row:
    """One way of training."""

    way: str
    tokens_per_second: float
    """Real tokens of a round over its time, updates of the adapter included."""
    peak_gib: float
    fill: float
    cells: int
    """Of the largest micro-batch of the round."""
    samples_per_step: int
    rounds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """The model, its samples, and what has been measured so far."""

    model: Any
    work: Work
    config: StitchedBenchConfig
    device: torch.device
    result: dict[str, Any]
    began: float
    keep: Callable[[], None]
    say: Callable[[str], None]


def run_stitched(config: StitchedBenchConfig, *, out: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all ways; the result is written to `out` after every one, ratios first."""
    device = torch.device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    result: dict[str, Any] = {"ratios": {}, "rows": [], "left_out": [], **_about(config)}
    began = time.monotonic()
    model = build_stitched(config)
    forget_models()  # what of the donors is not used
    work = make_samples(model, config)
    result["work"] = {
        "samples": len(work.lengths), "mean_tokens": float(work.lengths.mean()), "longest": int(work.lengths.max()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "parameters": sum(p.numel() for p in model.parameters()),
        "padded_shares": padded_shares(work.lengths, config.longest),
    }  # fmt: skip
    say(f"built in {time.monotonic() - began:.1f} s: {result['work']}")
    bench = Bench(model, work, config, device, result, began, lambda: keep_result(result, out), say)
    _measure_all(bench)
    result["seconds"] = time.monotonic() - began
    bench.keep()
    for name, value in result["ratios"].items():
        say(f"{name}: {value:,.2f}" if isinstance(value, float) else f"{name}: {value:,}")
    return result


def _measure_all(bench: Bench) -> None:
    ways = {way.name: way for way in all_ways(bench.model, bench.work, device=bench.device, backend="inductor")}
    alone = ways["one by one"]
    noted = _note_ways(bench, alone)
    note = _try(bench, noted["recommended"], NOTE_SAMPLES)
    _try(bench, noted["as found"], 1)
    _try(bench, noted["wished for"], 2 * NOTE_SAMPLES)
    _try(bench, replace(alone, name="batch 1, accumulation 4, not padded"), NOTE_SAMPLES)
    _try(bench, replace(ways["HF default, 8"], name="batch 8, padded to the longest of it"), 8)
    same = _try(bench, _same_step_way(bench, ways["ours packed"]), NOTE_SAMPLES)
    packed = [_try(bench, _packed_way(bench, cells), 0) for cells in bench.config.budgets]
    ratios = bench.result["ratios"]
    if note is not None:
        found = [row for row in packed if row is not None]
        best = max(found, key=lambda row: row.tokens_per_second, default=None)
        if best is not None:
            ratios["packed at the fitted budget / the note"] = best.tokens_per_second / note.tokens_per_second
            ratios["fitted budget, cells"] = best.cells
        if same is not None:
            ratios["packed, the note's own steps of 4 samples / the note"] = (
                same.tokens_per_second / note.tokens_per_second
            )
        if bench.device.type == "cuda":
            _at_memory(bench, note, found)
    bench.keep()
    if bench.device.type == "cpu":
        _even_rows(bench)
    _stored_forms(bench)


def _try(bench: Bench, way: Way, samples_per_step: int) -> Row | None:
    """Measure one way, unless the time is over; what fails is named and does not cost the others."""
    if time.monotonic() - bench.began > bench.config.seconds:
        bench.result["left_out"].append(f"{way.name}: out of time")
        return None
    try:
        row = _measure(bench, way, samples_per_step)
    except (RuntimeError, ValueError) as error:
        bench.result["left_out"].append(f"{way.name}: {type(error).__name__}: {str(error)[:300]}")
        bench.say(f"{way.name}: left out, {type(error).__name__}: {str(error)[:200]}")
        forget_models()
        return None
    bench.result["rows"].append(asdict(row))
    bench.say(f"{row.way}: {row.tokens_per_second:,.0f} real tokens/s, {row.peak_gib:.2f} GiB, fill {row.fill:.1%}")
    bench.keep()
    return row


def _measure(bench: Bench, way: Way, samples_per_step: int) -> Row:
    parts, _ = typical_parts(way.parts(), way.most)
    batches = [pin_batch(part.make(), bench.device) for part in parts]
    trained = [p for p in bench.model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.0, fused=bench.device.type == "cuda")
    each = samples_per_step // max(batches[0].num_samples, 1) if samples_per_step else 1

    def one_round() -> None:
        for number, batch in enumerate(batches, 1):
            way.run(batch)
            if number % max(each, 1) == 0 or number == len(batches):
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)

    with way.around():
        one_round()  # warm
        reset_peak_memory(bench.device)
        took: list[float] = []
        began = time.monotonic()
        while len(took) < 2 or (
            len(took) < bench.config.rounds_at_most and time.monotonic() - began < bench.config.way_seconds
        ):
            took.append(time_once(one_round, bench.device))
    tokens = sum(part.tokens for part in parts)
    return Row(
        way=way.name, tokens_per_second=tokens / statistics.median(took), peak_gib=peak_gib(bench.device),
        fill=tokens / sum(part.cells for part in parts), cells=max(part.cells for part in parts),
        samples_per_step=samples_per_step or batches[0].num_samples, rounds=[tokens / t for t in took],
    )  # fmt: skip


def _note_ways(bench: Bench, alone: Way) -> dict[str, Way]:
    """The note's three settings on this (causal) model: samples padded to the longest; as found nothing is accumulated."""
    longest = bench.config.longest
    named = {
        "recommended": ("the note: batch 1, accumulation 4", 1, True),
        "as found": ("as found: batch 1, no accumulation", 1, False),
        "wished for": ("wished for: batch 2, accumulation 4", 2, True),
    }
    return {
        key: replace(
            alone, name=f"{name}, padded to {longest}" + (", checkpointing" if checkpointing else ""), most=16 // rows,
            parts=partial(_full_rows, bench.work, rows, longest),
            around=partial(_checkpointing, bench.model) if checkpointing else nullcontext,
        )
        for key, (name, rows, checkpointing) in named.items()
    }  # fmt: skip


def _full_rows(work: Work, rows: int, longest: int) -> list[Part]:
    groups = [np.arange(i, i + rows) for i in range(0, len(work.lengths) - rows + 1, rows)]
    return [work.part(padded_rows(ids, longest)) for ids in groups]


def _same_step_way(bench: Bench, packed: Way) -> Way:
    work, number = bench.work, NOTE_SAMPLES
    groups = [np.arange(i, i + number) for i in range(0, len(work.lengths) - number + 1, number)]
    return replace(
        packed, name="packed, the note's own steps of 4 samples", most=16,
        parts=lambda: [work.part(packed_row(ids, int(work.lengths[ids].sum()))) for ids in groups],
        around=lambda: use_packed_attention(bench.model),
    )  # fmt: skip


def _packed_way(bench: Bench, cells: int, *, checkpointing: bool = False) -> Way:
    work = replace(bench.work, cells=cells, slots=slots_of(cells))
    packed = next(
        w for w in all_ways(bench.model, work, device=bench.device, backend="inductor") if w.name == "ours packed"
    )
    largest = max(bench.config.budgets)
    name = f"packed, {cells} cells" + (", checkpointing" if checkpointing else "")
    around = (lambda: _both(bench.model)) if checkpointing else (lambda: use_packed_attention(bench.model))
    return replace(packed, name=name, most=max(largest // cells // 2, 1), around=around)


@contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def _both(model: Any) -> Iterator[None]:
    with use_packed_attention(model), _checkpointing(model):
        yield


def _at_memory(bench: Bench, note: Row, packed: Sequence[Row]) -> None:
    """Packed rows in no more memory than the note's settings take, and the largest budget of the note's GPU."""
    ratios = bench.result["ratios"]
    again = [_try(bench, _packed_way(bench, cells, checkpointing=True), 0) for cells in bench.config.budgets[:2]]
    points = {False: list(packed), True: [row for row in again if row is not None]}
    limits = {"the note's own memory": note.peak_gib, f"{bench.config.card_gib:g} GiB": bench.config.card_gib}
    for what, limit in limits.items():
        for checkpointing, rows in points.items():
            row = _largest_within(bench, rows, limit, checkpointing=checkpointing)
            if row is None:
                continue
            words = f"packed in {what}" + (", checkpointing" if checkpointing else "")
            ratios[f"{words}: cells"] = row.cells
            ratios[f"{words} / the note"] = row.tokens_per_second / note.tokens_per_second
            bench.keep()


def _largest_within(bench: Bench, rows: list[Row], limit_gib: float, *, checkpointing: bool) -> Row | None:
    """The largest budget that was run within a limit: found on the line through what was run, and run itself.

    What is run is added to `rows`, so that the line gets better with every budget that is tried.
    """
    for _ in range(3):
        cells = largest_budget(rows, limit_gib)
        if not cells or any(row.cells == cells for row in rows):
            break
        row = _try(bench, _packed_way(bench, cells, checkpointing=checkpointing), 0)
        if row is None:
            break
        rows.append(row)
    return max((row for row in rows if row.peak_gib <= limit_gib), key=lambda row: row.cells, default=None)


def largest_budget(rows: Sequence[Row], limit_gib: float) -> int:
    """Cells whose peak stays under a limit, by the line through the two rows next to it; a multiple of 512."""
    if len(rows) < 2:
        return 0
    wanted = limit_gib * 0.97  # three hundredths for what the line does not know
    first, last = sorted(sorted(rows, key=lambda row: abs(row.peak_gib - wanted))[:2], key=lambda row: row.cells)
    per_cell = (last.peak_gib - first.peak_gib) / max(last.cells - first.cells, 1)
    cells = first.cells + (wanted - first.peak_gib) / per_cell if per_cell > 0 else 0
    return max(int(cells) // 512 * 512, 0)


def _even_rows(bench: Bench) -> None:
    """Rows of 64 tokens, one and eight at a time: what a batch alone is worth, without raggedness."""
    known = bench.work.samples[:64]
    samples = [{name: np.resize(value, 64) for name, value in sample.items()} for sample in known]
    work = Work(bench.work.head, np.full(len(samples), 64), samples, 512, 64)
    alone = next(
        w for w in all_ways(bench.model, work, device=bench.device, backend="inductor") if w.name == "one by one"
    )
    rows = []
    for number in (1, 8):
        way = replace(
            alone, name=f"even rows of 64 tokens, {number} at a time", most=max(32 // number, 2),
            parts=partial(_even_parts, work, number),
        )  # fmt: skip
        rows.append(_try(bench, way, number))
    if rows[0] is not None and rows[1] is not None:
        ratio = rows[1].tokens_per_second / rows[0].tokens_per_second
        bench.result["ratios"]["8 rows of 64 tokens / 1 row"] = ratio
        bench.keep()


def _stored_forms(bench: Bench) -> None:
    """Memory of the weights and loss of the same samples, for every form frozen donors can be stored in."""
    batch = bench.work.collate(padded_rows(np.arange(32), int(bench.work.lengths[:32].max()))).to(bench.device)
    objective = HeadObjective(head=bench.work.head)
    for form in ("fp32", "bf16", "int8"):
        if time.monotonic() - bench.began > bench.config.seconds:
            bench.result["left_out"].append(f"donors in {form}: out of time")
            continue
        model = build_stitched(bench.config)
        try:
            store_donors(model, form, "bf16" if bench.device.type == "cuda" else "fp32")
        except ConfigError as error:
            bench.result["left_out"].append(f"donors in {form}: {error.wrong}")
            continue
        with torch.no_grad():
            loss = float(objective.sums(model, batch)["nll"]) / objective.counts(batch)["nll"]
        bench.result.setdefault("stored", {})[form] = {"weights_gib": stored_bytes(model) / GIB, "loss": loss}
        bench.say(f"donors in {form}: weights {stored_bytes(model) / GIB:.4f} GiB, loss {loss:.5f}")
        bench.keep()


def _even_parts(work: Work, number: int) -> list[Part]:
    groups = [np.arange(i, i + number) for i in range(0, len(work.lengths) - number + 1, number)]
    return [work.part(padded_rows(ids, 64)) for ids in groups]


def _about(config: StitchedBenchConfig) -> dict[str, Any]:
    hardware = torch.cuda.get_device_name() if config.device == "cuda" else platform.machine()
    memory = torch.cuda.get_device_properties(0).total_memory / GIB if config.device == "cuda" else 0.0
    return {
        "command": command_line("benchmarks.systems.stitched_llm"),
        "date": today(), "hardware": hardware, "card_gib": memory,
        "torch": torch.__version__, "transformers": version("transformers"), "python": platform.python_version(),
        "config": asdict(config),
    }  # fmt: skip


def make_config(*, device: str, seconds: float | None = None, quick: bool = False) -> StitchedBenchConfig:
    """Full sizes for a GPU and tiny ones for a CPU."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError("this device cannot be measured", seen=f"device={device!r}", do="use cpu, or cuda on a GPU")
    sizes: dict[str, Any] = dict(TINY_SIZES) if device == "cpu" else {}
    sizes |= {"seconds": seconds} if seconds is not None else {}
    if quick:
        sizes |= {"way_seconds": 0.0, "rounds_at_most": 2, "samples": 200 if device == "cpu" else 4096}
    return StitchedBenchConfig(device=device, **sizes)


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: a dry run")
    args = parser.parse_args()
    run_stitched(make_config(device=args.device, seconds=args.seconds, quick=args.quick), out=args.out, say=_say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
