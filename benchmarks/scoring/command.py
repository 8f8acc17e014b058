"""`truebatch score` on a CPU as it is typed: its own budget, eight samples a batch, and one by one, in turns.

A judge with random weights and prompts of many lengths, written into a folder; nothing is downloaded. Every row is a process
of its own: seconds of CPU time from its first line to its last, and what it needs for a single sample beside that. The budget
that the command chooses is measured in a run before, which is a row of its own, and kept for the others.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.commands.folders import END, SPECIAL, make_tokenizer
from benchmarks.harness.benchmark import Benchmark, Row, option
from benchmarks.harness.process import run_measured
from truebatch.scoring.store.manifest import read_manifest

FIRST, DEFAULT, EIGHT, ALONE, START = "measuring too", "default", "--rows 8", "one by one", "a single sample"
WAYS: Mapping[str, Sequence[str]] = {
    FIRST: (), DEFAULT: (), EIGHT: ("--rows", "8"), ALONE: ("--rows", "1"), START: (),
}  # fmt: skip
READOUTS: Mapping[str, Sequence[str]] = {
    "labels": ("--labels", "w1=1,w2=2,w3=3"), "texts": ("--generate", "--max-new-tokens", "16"),
}  # fmt: skip
MOST_SLOWER = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandOptions:
    """How much is judged."""

    prompts: int = option(480, "Prompts of log-normal lengths.")
    median: int = option(50, "Words of a prompt.")
    hidden: int = option(256, "Width of the judge.")
    layers: int = option(4, "Layers of the judge.")
    repeats: int = option(2, "Rounds, of which the cheapest counts.")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder with the judge and the prompts."""

    case: str
    place: tempfile.TemporaryDirectory[str]
    number: int


def prepare(options: CommandOptions, case: str) -> Prepared:
    """Write the judge, the prompts and a file with one of them."""
    place = tempfile.TemporaryDirectory(prefix="truebatch-score-")
    folder, vocabulary = Path(place.name), 4000
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 32, "max_position_embeddings": 2048, "vocab_size": vocabulary,
        "bos_token_id": 1, "eos_token_id": END, "pad_token_id": END,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder / "judge")
    make_tokenizer(vocabulary).save_pretrained(folder / "judge")
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(options.median), 0.6, options.prompts), 4, 1000).astype(int)
    words = [" ".join(f"w{at}" for at in draw.integers(0, vocabulary - len(SPECIAL), n)) for n in lengths]
    lines = [json.dumps({"id": str(at), "user": text}) + "\n" for at, text in enumerate(words)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    (folder / "one.jsonl").write_text(lines[0])
    return Prepared(case, place, options.prompts)


def measure(prepared: Prepared, method: str) -> Row:
    """One process of the command; `judging_cpu_seconds` leaves out what a single sample takes."""
    folder = Path(prepared.place.name)
    data, runs = folder / ("one.jsonl" if method == START else "prompts.jsonl"), folder / "runs"
    cache = folder / "cache"
    if method == FIRST and cache.exists():
        cache.rename(folder / f"cache-{len(list(folder.iterdir()))}")
    out = runs / f"{len(list(runs.iterdir())) if runs.exists() else 0}"
    command = [
        sys.executable,
        "-m",
        "truebatch",
        "score",
        str(data),
        "--model",
        str(folder / "judge"),
        "--device",
        "cpu",
    ]
    os.environ.update(TRUEBATCH_CACHE=str(cache), OMP_NUM_THREADS="1")
    found = run_measured([*command, *READOUTS[prepared.case], *WAYS[method], "--out", str(out)])
    cells = read_manifest(out).fields["sameness"]["cells"]
    return {"samples": 1 if method == START else prepared.number, "cells": cells, **found}


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """CPU time beside a single sample's: of other ways over that of the default, which is 1."""
    cpu = {(row["case"], row["method"]): row["cpu_seconds"] for row in rows}
    ratios = {
        f"{case}, {method}": (cpu[case, method] - cpu[case, START]) / (cpu[case, DEFAULT] - cpu[case, START])
        for case in READOUTS for method in (FIRST, EIGHT, ALONE)
        if {(case, method), (case, DEFAULT), (case, START)} <= cpu.keys()
    }  # fmt: skip
    return {"ratios": ratios} if ratios else {}


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """A default that is slower than what a user would have set."""
    return [
        f"{name}: {ratio:.2f} of the time of the default"
        for name, ratio in result.get("ratios", {}).items() if ratio * MOST_SLOWER < 1 and FIRST not in name
    ]  # fmt: skip


BENCHMARK = Benchmark(
    name="score_command",
    about=__doc__,
    options=CommandOptions,
    cases=lambda options: list(READOUTS),
    methods=lambda options: list(WAYS),
    prepare=prepare,
    measure=measure,
    rounds=lambda options: options.repeats,
    best_of="cpu_seconds",
    summary=summarize,
    problems=find_problems,
    libraries=("torch", "transformers"),
)
