"""How long `verify` takes for tiny models of every head, after import; the median of three."""

from __future__ import annotations

import statistics
import time
import warnings

from torch import nn

from benchmarks.harness.benchmark import Benchmark, Options, Row
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.api import verify
from truebatch.verification.subjects.hf_subject import random_samples

MODELS = {
    f"{name} {head}": (name, head)
    for name, head in (
        ("llama", "causal_lm"),
        ("gpt2", "causal_lm"),
        ("bert", "masked_lm"),
        ("bert", "token_classification"),
        ("llama", "sequence_classification"),
        ("t5", "seq2seq"),
        ("llava", "vision_language"),
    )
}
REPEATS = 3


def prepare(options: Options, case: str) -> tuple[str, nn.Module]:
    """The tiny model."""
    return case, tiny_model(*MODELS[case])


def measure(prepared: tuple[str, nn.Module], method: str) -> Row:
    """The median time of verifying one model with made-up samples: outputs, loss and gradients in every arrangement."""
    case, model = prepared
    samples, times = random_samples(model), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(REPEATS):
            began = time.perf_counter()
            report = verify(model, samples)
            times.append(time.perf_counter() - began)
    name, head = MODELS[case]
    figures = {"seconds": round(statistics.median(times), 3), "verdict": report.verdict}
    return {"model": name, "head": head, **figures, "arrangements": len(report.results)}


BENCHMARK = Benchmark(
    name="verify",
    about=f"{__doc__}\n\nThe target is under 5 s a tiny model on two cores.",
    cases=lambda options: list(MODELS),
    methods=lambda options: ["verify"],
    prepare=prepare,
    measure=measure,
    libraries=("transformers",),
)
