"""CPU time of `verify` for tiny models of every head, after import, beside one forward and backward of its samples one by
one; medians of three."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness.benchmark import Benchmark, Options, Row
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.api import verify
from truebatch.verification.arrangements import alone
from truebatch.verification.compare import run_whole
from truebatch.verification.config import VerifyConfig
from truebatch.verification.subjects.hf_subject import hf_subject, random_samples

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
HALF = "llama causal_lm bf16"
REPEATS = 3
FULL, QUICK = "full", "quick"
METHODS = (FULL, QUICK)


def prepare(options: Options, case: str) -> tuple[str, nn.Module]:
    """The tiny model."""
    model = tiny_model(*MODELS[case.removesuffix(" bf16")])
    return case, model.to(torch.bfloat16) if case == HALF else model


def measure(prepared: tuple[str, nn.Module], method: str) -> Row:
    """The median time of verifying one model with made-up samples, and of running them one by one."""
    case, model = prepared
    samples = random_samples(model)
    subject = hf_subject(model, samples)
    singles = alone(subject.lengths)
    config = VerifyConfig(quick=method == QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proofs, plain = [], []
        for _ in range(REPEATS):
            plain.append(_time(lambda: run_whole(subject, singles))[0])
            proofs.append(_time(lambda: verify(model, samples, config=config)))
    report = proofs[0][1]
    seconds, one_by_one = (statistics.median(times) for times in ([time for time, _ in proofs], plain))
    name, head = MODELS[case.removesuffix(" bf16")]
    return {
        "model": name, "head": head, "dtype": "bf16" if case == HALF else "fp32", "proof": method,
        "seconds": round(seconds, 3), "verdict": report.verdict, "arrangements": len(report.results),
        "one by one": round(one_by_one, 4), "times": round(seconds / one_by_one, 1),
    }  # fmt: skip


def _time(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


def summary(rows: Sequence[Row]) -> Mapping[str, float]:
    """The dearest proof of either kind, in runs of one by one."""
    return {f"{name}, most": max((r["times"] for r in rows if r["proof"] == name), default=0.0) for name in METHODS}


BENCHMARK = Benchmark(
    name="verify",
    about=f"{__doc__}\n\nThe targets: under 5 s per tiny model; 40 times one by one, 8 times for a quick proof.",
    cases=lambda options: [*MODELS, HALF],
    methods=lambda options: list(METHODS),
    prepare=prepare,
    measure=measure,
    summary=summary,
    libraries=("transformers",),
)
