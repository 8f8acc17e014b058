"""The note's table of speed and memory by batch size, measured: its own way, our batch 1, and larger batches.

    python -m benchmarks seqset_vae --device cpu --out docs/results/seqset_vae_cpu.json
    python -m benchmarks seqset_vae --device cuda --seconds 140 --out seqset_vae_cuda.json

One model, one process, the same generated stays. Forward and backward of every way are timed over the same stays; the
median round counts. The optimiser's update is timed apart and added once for every `samples_per_step` stays, so that all
ways have equal steps. On a CPU one thread runs, and its CPU seconds count. The loss curves of one training, cut in
different ways, stand beside the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, origin
from benchmarks.systems.seqset_vae_methods import count_saved, loss_of, make_batches, note_loss_of, warmed_up
from benchmarks.training.timing import GIB, forget_models, peak_gib, reset_peak_memory, time_once, time_update
from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch.objective import add_counts
from truebatch.reports.plots import curves
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, apply_update, take_gradients
from truebatch_systems.seqset_vae.config import GeneratorConfig, LossConfig, ModelConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import Stays
from truebatch_systems.seqset_vae.data.prepare import prepare
from truebatch_systems.seqset_vae.model.model import SeqSetVAE, read_stays
from truebatch_systems.seqset_vae.train.loss import SeqSetObjective

NOTE_CLAIMS = {1: 1.0, 4: 2.5, 8: 4.0, 16: 6.0}
"""Relative speed by batch size, as the note says it."""
SMALL = ModelConfig(embedding_dim=64, reduced_dim=32, latent_dim=32, inducing_points=4, feedforward_dim=32)
TINY = ModelConfig(embedding_dim=16, reduced_dim=8, latent_dim=8, inducing_points=2, feedforward_dim=8)
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqSetBenchConfig:
    """What is measured and for how long."""

    device: str = "cpu"
    model: ModelConfig = SMALL
    precision: str = "fp32"
    """Of all timed ways: fp32 or bf16. Loss curves are always fp32, where equality shows."""
    sizes: tuple[int, ...] = (1, 4, 8, 16, 32)
    """Stays of one forward pass."""
    note_sizes: tuple[int, ...] = (1, 16)
    stays: int = 64
    """Stays of the generator that are used; at least the largest size."""
    round_stays: int = 32
    """Stays of one round of a small size."""
    samples_per_step: int = 32
    way_seconds: float = 6.0
    curve_steps: int = 15
    seconds: float = 600.0
    """Nothing begins after this time; what was left out is named."""


@dataclass(kw_only=True, slots=True)
class Row:
    """One way at one batch size."""

    way: str
    batch_size: int
    stays_per_second: float
    """At equal steps: one update for `samples_per_step` stays, whatever the batch size."""
    updating_each: float
    """With one update for every forward pass, as the note counts."""
    peak_gib: float
    """On a GPU: the peak of all memory. On a CPU: what autograd keeps for backward."""
    padded_share: float
    """Of the cells in which sets attend; the note pads stays to the longest and strips it again."""
    rounds: list[float] = field(default_factory=list)
    """Seconds a stay, forward and backward alone."""


def run_seqset(config: SeqSetBenchConfig, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Measure all rows; the result is written to `out` after every one, ratios first."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    began = time.monotonic()
    result: dict[str, Any] = {
        "ratios": {},
        "rows": [],
        "left_out": [],
        **origin(config, command=command_line("benchmarks.systems.seqset_vae")),
        "threads": torch.get_num_threads(),
        "note_claims": NOTE_CLAIMS,
    }
    bench = Bench(config, *make_work(config), result, began)
    say(f"built in {time.monotonic() - began:.1f} s: {json.dumps(result['work'])}")
    update = time_update(bench.model, bench.device)
    result["seconds_per_update"] = update
    for way, size in [*(("ours", n) for n in config.sizes), *(("note", n) for n in config.note_sizes)]:
        row = bench.measure(way, size, update)
        if row is not None:
            result["rows"].append(asdict(row))
            say(f"{row.way}, batch {size}: {row.stays_per_second:,.1f} stays/s, {row.peak_gib:.3f} GiB")
        result["ratios"] = ratios(result["rows"])
        keep_result(result, out)
    _curves(bench, out, say)
    result["seconds"] = time.monotonic() - began
    keep_result(result, out)
    for name, value in result["ratios"].items():
        say(f"{name}: {value:.2f}")
    return result


def make_work(config: SeqSetBenchConfig) -> tuple[SeqSetVAE, SeqSetObjective, Stays]:
    """The model with random weights, its loss, and generated stays."""
    number = max(config.stays, *config.sizes)
    shares = {"validation_share": 0.0, "test_share": 0.0}
    settings = SeqSetConfig(model=config.model, generator=GeneratorConfig(stays=number), **shares)  # type: ignore[arg-type]
    ready = prepare(settings)
    torch.manual_seed(0)
    model = SeqSetVAE(config.model, torch.from_numpy(ready.variables.vectors.copy())).to(config.device).train()
    return model, warmed_up(SeqSetObjective(loss=LossConfig(), class_weights=(1.0, 1.0))), ready.train


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """What all rows share."""

    config: SeqSetBenchConfig
    model: SeqSetVAE
    objective: SeqSetObjective
    stays: Stays
    result: dict[str, Any]
    began: float

    def __post_init__(self) -> None:
        sizes = self.stays.num_sets
        self.result["work"] = {
            "stays": len(self.stays), "sets": int(sizes.sum()), "events": int(self.stays.num_events.sum()),
            "sets_of_a_stay": {"median": float(np.median(sizes)), "most": int(sizes.max())},
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Where all runs."""
        return torch.device(self.config.device)

    def measure(self, way: str, size: int, update: float) -> Row | None:
        """One row, or None with the reason among what was left out."""
        if time.monotonic() - self.began > self.config.seconds:
            self.result["left_out"].append(f"{way}, batch {size}: out of time")
            return None
        try:
            return self._measure(way, size, update)
        except (RuntimeError, MemoryError) as error:
            self.result["left_out"].append(f"{way}, batch {size}: {type(error).__name__}: {str(error)[:300]}")
            forget_models()
            return None

    def _measure(self, way: str, size: int, update: float) -> Row:
        number = min(max(size, self.config.round_stays), len(self.stays))
        number -= number % size
        work = self._work(way, list(range(number)), size)
        reset_peak_memory(self.device)
        with count_saved() as saved:
            work[0]()
        forget_models()
        reset_peak_memory(self.device)
        rounds = self._rounds(work)
        peak = saved.bytes / GIB if self.device.type == "cpu" else peak_gib(self.device)
        each = statistics.median(rounds) / number
        per_step = max(self.config.samples_per_step, size)
        return Row(
            way=f"{way}: {'one call a set' if way == 'note' else 'one call a micro-batch'}", batch_size=size,
            stays_per_second=1 / (each + update / per_step), updating_each=1 / (each + update / size),
            peak_gib=peak, padded_share=self._padded_share(size), rounds=[r / number for r in rounds],
        )  # fmt: skip

    def _rounds(self, work: list[Callable[[], None]]) -> list[float]:
        """At least one round, more while there is time; a first pass has warmed up."""
        took: list[float] = []
        began = time.monotonic()
        while not took or (len(took) < 7 and time.monotonic() - began < self.config.way_seconds):
            took.append(time_once(lambda: [one() for one in work], self.device))
        return took

    def _work(self, way: str, ids: list[int], size: int) -> list[Callable[[], None]]:
        """One function for each micro-batch: forward and backward."""
        if way == "ours":
            batches = [self._sent(batch) for batch in make_batches(self.stays, ids, size)]
            return [lambda batch=batch: self._step(loss_of, batch) for batch in batches]  # type: ignore[misc]
        alone = [self._sent(batch) for batch in make_batches(self.stays, ids, 1)]
        groups = [alone[k : k + size] for k in range(0, len(alone), size)]
        return [lambda group=group: self._step(note_loss_of, group) for group in groups]  # type: ignore[misc]

    def _sent(self, batch: MicroBatch) -> MicroBatch:
        return batch.to(self.device)

    def _step(self, loss: Callable[..., torch.Tensor], batch: Any) -> None:
        with without_cudnn_sdpa(self.device):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                found = loss(self.model, self.objective, batch)
            found.backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)

    def _padded_share(self, size: int) -> float:
        layouts = [read_stays(self._sent(b)).layout for b in make_batches(self.stays, list(range(size)), size)]
        return 1 - sum(len(one.owner) for one in layouts) / sum(one.num_cells for one in layouts)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How much faster each batch size is than our batch 1 and than the note's way, at equal steps."""
    ours = {row["batch_size"]: row["stays_per_second"] for row in rows if row["way"].startswith("ours")}
    note = {row["batch_size"]: row["stays_per_second"] for row in rows if row["way"].startswith("note")}
    found = {f"batch {n} / our batch 1": rate / ours[1] for n, rate in ours.items() if 1 in ours}
    found |= {f"batch {n} / the note's way": rate / max(note.values()) for n, rate in ours.items() if note}
    found |= {f"the note's batch {n} / its batch 1": rate / note[1] for n, rate in note.items() if 1 in note and n > 1}
    return found


def _curves(bench: Bench, out: Path | None, say: Say) -> None:
    """The same training of 16 stays a step, cut in three ways: losses, and how far they are apart."""
    size = min(16, len(bench.stays))
    found: dict[str, list[float]] = {}
    start = {name: value.clone() for name, value in bench.model.state_dict().items()}
    for cut in (1, 4, size):
        if time.monotonic() - bench.began > bench.config.seconds:
            bench.result["left_out"].append(f"loss curve, batch {cut}: out of time")
            continue
        bench.model.load_state_dict(start)
        found[f"batch {cut}"] = _train(bench, size, cut)
        say(f"loss curve, batch {cut}: {found[f'batch {cut}'][0]:.4f} -> {found[f'batch {cut}'][-1]:.4f}")
    first = np.array(next(iter(found.values()), []))
    apart = [float(np.abs(np.array(one) / first - 1).max()) for one in found.values()]
    bench.result["curves"] = {"samples_per_step": size, "loss": found, "largest_relative_difference": max(apart)}
    if out is not None and find_spec("matplotlib") is not None:
        lines = {name: (list(range(1, len(one) + 1)), one) for name, one in found.items()}
        picture = curves(lines, title=f"Loss, {size} stays a step", x="step", y="loss", log_y=True)
        out.with_suffix(".svg").write_text(picture, encoding="utf-8")


def _train(bench: Bench, size: int, cut: int) -> list[float]:
    optimiser = torch.optim.AdamW(bench.model.parameters(), lr=1e-3)
    groups = make_groups([Group(optimiser=optimiser)], bench.model)
    engine = StepEngine(model=bench.model, objective=bench.objective, groups=groups, device=bench.device)
    losses = []
    for step in range(bench.config.curve_steps):
        ids = [(step * size + k) % len(bench.stays) for k in range(size)]
        batches = make_batches(bench.stays, ids, cut)
        counts = add_counts(bench.objective.counts(batch) for batch in batches)
        outcome = take_gradients(engine, batches, counts, epoch=0)
        apply_update(engine, outcome)
        losses.append(sum(outcome.loss.values()))
    return losses


def make_config(*, device: str, seconds: float | None = None, quick: bool = False) -> SeqSetBenchConfig:
    """The note's sizes on a GPU, a small model on a CPU; `quick` is a dry run."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError("this device cannot be measured", seen=f"device={device!r}", do="use cpu, or cuda on a GPU")
    sizes: dict[str, Any] = {}
    if device == "cuda":
        sizes = {
            "model": ModelConfig(), "precision": "bf16", "sizes": (1, 4, 8, 16, 32, 64, 128, 256, 512), "stays": 512,
            "curve_steps": 20,
            "samples_per_step": 512, "way_seconds": 4.0, "round_stays": 16, "seconds": 140.0,
        }  # fmt: skip
    if quick:
        sizes |= {
            "model": TINY, "sizes": (1, 4), "note_sizes": (1,), "stays": 8, "round_stays": 4, "samples_per_step": 4,
            "way_seconds": 0.0, "curve_steps": 2,
        }  # fmt: skip
    if seconds is not None:
        sizes["seconds"] = seconds
    return SeqSetBenchConfig(device=device, **sizes)


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--out", type=Path, default=None, help="write all rows as JSON, and the curves as SVG beside it"
    )
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few stays: a dry run")
    args = parser.parse_args()
    run_seqset(make_config(device=args.device, seconds=args.seconds, quick=args.quick), out=args.out, say=_say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
