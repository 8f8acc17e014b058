"""What a step costs beside the loop that anybody would write: CPU time per step of `tb.train` and of a bare loop, in turns.

Both take the same samples in the same steps with the same optimiser, clip gradients and read the loss. The bare loop makes
its tensors itself, keeps no promise and writes nothing. One thread; CPU time, so that other processes do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.benchmark import Benchmark, Row, option
from truebatch.batch.fields import Field
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.objective import Objective
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.trainer import train

BARE, OURS = "a bare loop", "tb.train"
MOST_MS, FROM_MS, MOST_RATIO, LEAST_OFF = 0.3, 5.0, 1.1, 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCostOptions:
    """How long each round is."""

    seconds: float = option(3.0, "Of each method and round, about.")
    repeats: int = option(3, "Rounds, of which the best counts.")


@dataclass(frozen=True, slots=True)
class StepCase:
    """One model and its samples."""

    build: Callable[[], nn.Module]
    objective: Callable[[nn.Module], Objective]
    fields: Callable[[nn.Module], Sequence[Field]]
    samples: Sequence[Mapping[str, Any]]
    samples_per_step: int
    loss: Callable[[nn.Module, Sequence[Mapping[str, Any]]], Tensor]
    """Of the bare loop: the loss of samples that it runs together."""
    is_one_by_one: bool
    """`true_batch: off`, beside a loop that runs one sample at a time."""


class Squares:
    """The mean of squared outputs."""

    def counts(self, batch: Any) -> dict[str, int]:
        return {"loss": batch.num_samples}

    def sums(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": model(batch["x"]).square().sum()}


def _squares(model: nn.Module, samples: Sequence[Mapping[str, Any]]) -> Tensor:
    return model(torch.tensor([one["x"] for one in samples])).square().sum()


def _next_token(model: nn.Module, samples: Sequence[Mapping[str, Any]]) -> Tensor:
    (sample,) = samples
    ids = torch.tensor([sample["input_ids"]])
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")


def _dense(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _vectors(width: int) -> list[dict[str, Any]]:
    values = np.random.default_rng(0).normal(size=(256, width)).astype(np.float32)
    return [{"x": row.tolist()} for row in values]


def _texts() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(20, 120, 256)
    return [{"input_ids": ids, "labels": ids} for ids in (draw.integers(5, 60, n).tolist() for n in lengths)]


def _vector_case(width: int, layers: int, together: int, *, is_one_by_one: bool = False) -> StepCase:
    return StepCase(
        build=partial(_dense, width, layers), objective=lambda model: Squares(),
        fields=lambda model: [Field(name="x", kind="once")], samples=_vectors(width), samples_per_step=together,
        loss=_squares, is_one_by_one=is_one_by_one,
    )  # fmt: skip


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            pad_token_id=0,
        )
    )  # fmt: skip


def _text_case(build: Callable[[], nn.Module]) -> StepCase:
    return StepCase(
        build=build, objective=lambda model: HeadObjective(head=head_of(model)),
        fields=lambda model: head_of(model).fields, samples=_texts(), samples_per_step=8, loss=_next_token,
        is_one_by_one=True,
    )  # fmt: skip


CASES: dict[str, Callable[[], StepCase]] = {
    "a trivial model": partial(_vector_case, 2, 1, 1),
    "a step of milliseconds": partial(_vector_case, 512, 6, 16),
    "one by one, a small perceptron": partial(_vector_case, 256, 4, 8, is_one_by_one=True),
    "one by one, a tiny llama": partial(_text_case, partial(tiny_model, "llama")),
    "one by one, a llama of 4 million": partial(_text_case, _llama),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case and how long a round of it is."""

    options: StepCostOptions
    case: StepCase
    steps: int


def prepare(options: StepCostOptions, name: str) -> Prepared:
    """As many steps as fill a round of the bare loop."""
    torch.set_num_threads(1)
    case = CASES[name]()
    _bare(case, 3)
    return Prepared(options, case, max(20, int(options.seconds / _bare(case, 10))))


def measure(prepared: Prepared, method: str) -> Row:
    """Milliseconds of CPU time per step, beside the first steps, which build what is kept."""
    seconds = (_bare if method == BARE else _ours)(prepared.case, prepared.steps)
    return {"ms": 1000 * seconds, "steps": prepared.steps}


def _bare(case: StepCase, steps: int) -> float:
    torch.manual_seed(0)
    model = case.build().train()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.0)
    order, at, each = np.random.default_rng(0).permutation(len(case.samples)), 0, case.samples_per_step
    began = time.process_time()
    for _ in range(steps):
        ids = [order[(at + i) % len(order)] for i in range(each)]
        at += each
        samples = [case.samples[i] for i in ids]
        total = 0.0
        count = sum(len(one["input_ids"]) - 1 for one in samples) if "input_ids" in samples[0] else each
        for part in [[one] for one in samples] if case.is_one_by_one else [samples]:
            loss = case.loss(model, part) / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    return (time.process_time() - began) / steps


class _Clock:
    """When steps ended, by the CPU time of this process."""

    def __init__(self, first: int, last: int) -> None:
        self.steps, self.times = (first, last), list[float]()

    def begin(self, step: int, num_steps: int) -> None:
        """Nothing is to be made ready."""

    def record(self, record: Mapping[str, Any]) -> None:
        """A step has ended; asking for the time takes time itself, so it is asked for twice."""
        if record["step"] in self.steps:
            self.times.append(time.process_time())

    def close(self) -> None:
        """Nothing is open."""


def _ours(case: StepCase, steps: int) -> float:
    torch.manual_seed(0)
    model, warm = case.build().train(), 10
    clock = _Clock(warm, warm + steps)
    more: dict[str, Any] = {"true_batch": "off"} if case.is_one_by_one else {}
    config = TrainConfig(
        samples_per_step=case.samples_per_step, max_steps=steps + warm, epochs=1_000_000, learning_rate=1e-4,
        check_samples=0, **more,
    )  # fmt: skip
    data = TrainData(samples=case.samples, fields=case.fields(model))
    train(model, case.objective(model), data, config, loggers=[clock])
    return (clock.times[1] - clock.times[0]) / steps


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Times as fast as the bare loop, and what a step costs over it."""
    ms = {(row["case"], row["method"]): row["ms"] for row in rows}
    both = [case for case, method in ms if method == OURS and (case, BARE) in ms]
    if not both:
        return {}
    return {
        "ratios": {case: ms[case, BARE] / ms[case, OURS] for case in both},
        "milliseconds over a bare loop": {case: ms[case, OURS] - ms[case, BARE] for case in both},
    }


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """A step that costs too much."""
    ms = {(row["case"], row["method"]): row["ms"] for row in result["rows"]}
    lines = []
    for case, ratio in result.get("ratios", {}).items():
        over, bare = result["milliseconds over a bare loop"][case], ms[case, BARE]
        if case.startswith("one by one") and ratio < LEAST_OFF:
            lines.append(f"{case}: {ratio:.2f} of a bare loop, not {LEAST_OFF}")
        elif bare >= FROM_MS and ratio < 1 / MOST_RATIO:
            lines.append(f"{case}: {1 / ratio:.2f} times a bare loop, not {MOST_RATIO}")
        elif case == "a trivial model" and over > MOST_MS:
            lines.append(f"{case}: {over:.2f} ms over a bare loop, not {MOST_MS}")
    return lines


BENCHMARK = Benchmark(
    name="step_cost",
    about=__doc__,
    options=StepCostOptions,
    cases=lambda options: list(CASES),
    methods=lambda options: [BARE, OURS],
    prepare=prepare,
    measure=measure,
    rounds=lambda options: options.repeats,
    best_of="ms",
    summary=summarize,
    problems=find_problems,
    libraries=("torch", "transformers"),
)
