"""Whether `verify` judges models in bf16 rightly: right ones of several seeds, and the same with a leak of 1 % of their
output's norm."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.benchmark import Benchmark, Options, Row, option
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples
from truebatch.verification.api import verify

LENGTHS = (5, 23, 9, 2, 17, 31, 3, 12)
DENSE = ("gpt2", "gpt_neox", "llama", "qwen3", "mistral", "gemma", "phi", "opt", "bloom", "olmo")
EXPERTS = ("mixtral", "qwen2_moe")
RIGHT, FAULTY = "right", "leak of 1 %"
LEAK = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfOptions(Options):
    """How many weights of every architecture."""

    seeds: int = option(10, "Right models of every architecture, each with weights of its own.")
    faulty: int = option(1, "Models with the fault, of every architecture.")


def prepare(options: HalfOptions, case: str) -> tuple[HalfOptions, str]:
    """The architecture; its models are made one after another."""
    return options, case


def measure(prepared: tuple[HalfOptions, str], method: str) -> Row:
    """The verdicts for all seeds of an architecture."""
    options, name = prepared
    seeds = options.seeds if method == RIGHT else options.faulty
    verdicts = Counter(_verdict(name, seed, is_faulty=method == FAULTY) for seed in range(seeds))
    return {
        "model": name,
        "weights": method,
        "models": seeds,
        **{k: verdicts[k] for k in ("equal", "broken", "unproven")},
    }


def _verdict(name: str, seed: int, *, is_faulty: bool) -> str:
    model = tiny_model(name, seed=seed).to(torch.bfloat16)
    if is_faulty:
        plant_leak(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return verify(model, make_samples(model, LENGTHS)).verdict


def plant_leak(model: nn.Module) -> None:
    """What a cell gets of the mean over its row has 1 % of the norm of what goes into the output layer."""

    def add(_module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        mean = given[0].mean(1, keepdim=True).expand_as(given[0])
        return (given[0] + LEAK * mean * (given[0].norm() / mean.norm()),)

    model.get_output_embeddings().register_forward_pre_hook(add)  # type: ignore[operator]


def summary(rows: Sequence[Row]) -> Mapping[str, float | int]:
    """Alarms among right models, and dense models whose fault was found."""
    right = [row for row in rows if row["weights"] == RIGHT]
    faulty = [row for row in rows if row["weights"] == FAULTY and row["model"] in DENSE]
    return {
        "right models": sum(row["models"] for row in right),
        "alarms": sum(row["broken"] for row in right),
        "unproven, of experts": sum(row["unproven"] for row in right if row["model"] in EXPERTS),
        "unproven, dense": sum(row["unproven"] for row in right if row["model"] in DENSE),
        "dense models with the fault": sum(row["models"] for row in faulty),
        "found": sum(row["broken"] for row in faulty),
    }


BENCHMARK = Benchmark(
    name="half_precision",
    about=f"{__doc__}\n\nThe targets: at most 2 % alarms, and the fault found in 9 of 10 dense models.",
    cases=lambda options: [*DENSE, *EXPERTS],
    methods=lambda options: [RIGHT, FAULTY],
    options=HalfOptions,
    prepare=prepare,
    measure=measure,
    summary=summary,
    libraries=("transformers",),
)
