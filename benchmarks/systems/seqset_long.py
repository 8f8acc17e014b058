"""seqset_vae: patients of 28,000 to 52,000 events are trained on without cutting; memory of the whole process.

    python -m benchmarks seqset_long --json docs/results/seqset_vae_long.json
    python -m benchmarks seqset_long --data MIMIC-IV-DEMO-MEDS --json docs/results/seqset_vae_long.json

Every case is a process of its own: `truebatch train seqset_vae`, the default model, one patient a forward pass.
With --data the longest patients of a MEDS dataset are taken; else patients of these lengths are made up.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.benchmark import Benchmark, Options, Row, option
from benchmarks.harness.process import run_measured
from truebatch_systems.seqset_vae.config import NO_LABELS, SeqSetConfig
from truebatch_systems.seqset_vae.data.faults import Findings, Policy
from truebatch_systems.seqset_vae.data.read import read_source

LIMIT_GIB = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LongOptions(Options):
    """Which patients, and how far."""

    data: str = option("", "A MEDS dataset, for its longest patients; without, they are made up.")
    events: tuple[int, ...] = option((28_000, 36_000, 44_000, 52_000), "Events of the patients that are made up.")
    set_events: float = option(6.0, "Events of a set, on average, of the patients that are made up.")
    steps: int = option(4, "Updates; each sees one patient.")
    embedding_dim: int = option(768, "Width of a variable's vector.")
    latent_dim: int = option(256, "Width of the model.")


def measure(prepared: tuple[LongOptions, str], method: str) -> Row:
    """Peak memory and seconds of a run over these patients."""
    options, _ = prepared
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "patients"
        events = _write(folder, options)
        command = [sys.executable, "-m", "truebatch", "train", "seqset_vae", "--out", f"{place}/run"]
        settings = {
            "data": folder, "validation_share": 0, "test_share": 0, "mode": "pretrain", "train.batch_size": 1,
            "train.samples_per_step": 1, "train.max_steps": options.steps, "train.check_samples": 0,
            "detector.enabled": "false",
            "model.embedding_dim": options.embedding_dim, "model.latent_dim": options.latent_dim,
            "model.reduced_dim": options.latent_dim,
        }  # fmt: skip
        command += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        taken = run_measured(command)
        trained = _events_trained(Path(place) / "run")
    return {
        "patients": len(events), "events": events, "events_trained": trained, "steps": options.steps,
        "peak_gib": taken["memory_mib"] / 1024, "cpu_seconds": taken["cpu_seconds"],
        "cpu_seconds_per_1000_events": 1000 * taken["cpu_seconds"] / sum(trained),
    }  # fmt: skip


def _write(folder: Path, options: LongOptions) -> list[int]:
    """The patients as the files of a folder; the events of each."""
    import pyarrow
    from pyarrow import parquet

    (folder / "train").mkdir(parents=True)
    patients = _from_meds(options) if options.data else [_made_up(options, number) for number in options.events]
    for at, columns in enumerate(patients):
        parquet.write_table(pyarrow.table(columns), folder / "train" / f"{at}.parquet")
    return [len(columns["minute"]) for columns in patients]


def _from_meds(options: LongOptions) -> list[dict[str, Any]]:
    source = read_source(SeqSetConfig(data=options.data, labels=NO_LABELS), Findings(Policy(drop_faulty=True)))
    train = source.splits["train"]
    names = np.array(source.variables.names, dtype=object)
    longest = np.argsort(-train.num_events, kind="stable")[: options.steps]
    return [
        {"variable": names[one["var"]].tolist(), "value": one["val"], "minute": one["minute"]}
        for one in (train[int(at)] for at in longest)
    ]


def _made_up(options: LongOptions, number: int) -> dict[str, Any]:
    """A patient of so many events: many small sets, some large ones, as in MIMIC-IV."""
    rng = np.random.default_rng(number)
    sizes = np.minimum(rng.geometric(1 / options.set_events, number), 400)
    sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), number)) + 1]
    names = [f"code {v}" for size in sizes for v in rng.permutation(1500)[:size]][:number]
    minute = np.repeat(np.cumsum(rng.exponential(30.0, len(sizes))).round(2), sizes)[:number]
    return {"variable": names, "value": rng.standard_normal(number), "minute": minute}


def _events_trained(run: Path) -> list[int]:
    from truebatch.training.logging.metrics_jsonl import read_metrics

    return [int(line["tokens"]) for line in read_metrics(run / "metrics.jsonl") if "tokens" in line]


def problems(result: Any) -> list[str]:
    """Events that were cut off, and more memory than promised."""
    found = []
    for row in result["rows"]:
        if row["peak_gib"] > LIMIT_GIB:
            found.append(f"{row['case']}: {row['peak_gib']:.1f} GiB, at most {LIMIT_GIB:g}")
        if not set(row["events_trained"]) <= set(row["events"]):
            found.append(f"{row['case']}: patients of {row['events']} events, steps of {row['events_trained']}")
    return found


BENCHMARK = Benchmark(
    name="seqset_long",
    about=__doc__ or "",
    options=LongOptions,
    cases=lambda options: ["MEDS" if options.data else "made up"],
    methods=lambda options: ["default model"],
    measure=measure,
    problems=problems,
    libraries=("torch", "pyarrow"),
)
