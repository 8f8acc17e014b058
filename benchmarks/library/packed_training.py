"""Whether training in packed rows goes where training one by one goes: 30 steps of tiny models that few can pack.

Every model is trained twice from the same weights on the same samples: packed, as truebatch cuts a step, and as a plain
loop that calls the model of transformers with one sample after the other. The loss of every step is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.harness.benchmark import Benchmark, Row, option
from truebatch.batch.collate import collate
from truebatch.errors import ConfigError
from truebatch.hf.heads.heads import ModelHead, head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import packed_row
from truebatch.testing.tiny_hf.model import tiny_model, tiny_types
from truebatch.testing.tiny_hf.random_samples import make_samples
from truebatch.verification.census.reference import alone_logits
from truebatch.verification.census.speed import how_packed
from truebatch.verification.census.worker import why_unfed
from truebatch.verification.choose_layout import is_proven

MODELS = {
    "causal_lm": (
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "falcon_h1", "nemotron_h", "mamba", "mamba2", "jamba",
        "zamba2", "bamba", "lfm2", "granitemoehybrid", "minimax", "rwkv", "recurrent_gemma", "deepseek_v32", "bloom",
    ),
    "seq2seq": ("t5", "bart"),
    "masked_lm": ("deberta-v2",),
    "vision_language": ("gemma3",),
}  # fmt: skip
CASES = {f"{name} {head}": (name, head) for head, names in MODELS.items() for name in names}
VISION = "vision_language"
LENGTHS = (9, 40, 3, 17, 6, 25)
"""Of the samples of a step, in random order from step to step."""
LIMIT = 1e-5

Sample = Mapping[str, Any]
Loss = Callable[[nn.Module, Sequence[Sample]], float]
"""Forward and backward of one step: the gradient is left in the model, the loss is given back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """How long every model is trained."""

    steps: int = option(30, "Updates of every model.")
    rate: float = option(3e-4, "Learning rate of AdamW.")
    vision: int = option(0, "1: every vision-language model of transformers instead, tower and all.")


class _Choices(TorchFunctionMode):
    """The experts and cells that `topk` chose, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            self.calls.append(found[1].detach().flatten(0, -2).sort(-1).values)
        return found


@contextmanager
def _chosen() -> Iterator[list[Tensor]]:
    with _Choices() as seen:
        yield seen.calls


def packed_step(head: ModelHead) -> Loss:
    """All samples of the step in one packed row."""
    objective = HeadObjective(head=head, in_chunks=False)

    def step(model: nn.Module, samples: Sequence[Sample]) -> float:
        rows = packed_row(np.arange(len(samples)), sum(len(sample["input_ids"]) for sample in samples))
        batch = collate(samples, rows, head.fields)
        loss = objective.sums(model, batch)["nll"] / objective.counts(batch)["nll"]
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    return step


def alone_step(head: ModelHead) -> Loss:
    """A plain loop over the samples."""
    shifts = any(field.name == "labels" and field.shift for field in head.fields)

    def step(model: nn.Module, samples: Sequence[Sample]) -> float:
        labels = [torch.as_tensor(sample["labels"])[int(shifts) :] for sample in samples]
        count, total = sum(int((one != -100).sum()) for one in labels), 0.0
        for sample, answers in zip(samples, labels, strict=True):
            logits = alone_logits(model, head, sample)[: len(answers)].float()
            loss = nn.functional.cross_entropy(logits, answers, ignore_index=-100, reduction="sum") / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    return step


def train(model: nn.Module, step: Loss, options: TrainingOptions) -> tuple[list[float], list[Tensor]]:
    """The loss of every step, and what was chosen in each."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate, eps=1e-6, weight_decay=0.0)
    losses, choices = [], []
    model.train()
    for at in range(options.steps):
        order = np.random.default_rng(at).permutation(len(LENGTHS))
        samples = make_samples(model, [LENGTHS[i] for i in order], seed=at)
        with _chosen() as calls:
            losses.append(step(model, samples))
        choices.append(_by_layer(calls, sum(len(sample["input_ids"]) for sample in samples)))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return losses, choices


def _by_layer(calls: Sequence[Tensor], cells: int) -> Tensor:
    """[layers, cells, k] of the routers, whose calls for single samples are laid end to end; empty without any."""
    widths = {call.shape[-1] for call in calls}
    total = sum(len(call) for call in calls)
    if len(widths) != 1 or not total or total % cells:
        return torch.empty(0)
    layers = total // cells
    if len(calls) == layers:
        return torch.stack(list(calls))
    by_sample = [calls[at : at + layers] for at in range(0, len(calls), layers)]
    return torch.stack([torch.cat([sample[layer] for sample in by_sample]) for layer in range(layers)])


def cases(options: TrainingOptions) -> list[str]:
    """The kept list, or all vision-language models that transformers has."""
    return [f"{name} {VISION}" for name in tiny_types(VISION)] if options.vision else list(CASES)


def prepare(options: TrainingOptions, case: str) -> tuple[TrainingOptions, str]:
    """Random weights are drawn where they are trained."""
    torch.set_num_threads(1)
    return options, case


def measure(prepared: tuple[TrainingOptions, str], method: str) -> Row:
    """The largest distance of two losses of one step, relative; and cells whose experts were others (None: no router)."""
    options, case = prepared
    name, head_name = case.split()
    about = {"model": name, "head": head_name}
    model, unfed = _ready(name, head_name)
    if model is None:
        return about | {"left out": unfed}
    head, other = head_of(model), copy.deepcopy(model)
    how = how_packed(model, head)  # found before anything is counted
    losses, choices = train(model, packed_step(head), options)
    wanted, known = train(other, alone_step(head), options)
    far = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    pairs = [(a, b) for a, b in zip(choices, known, strict=True) if a.numel() and a.shape == b.shape]
    return about | {
        "how": how,
        "first loss": round(wanted[0], 4),
        "last loss": round(wanted[-1], 4),
        "farthest": float(f"{max(far):.3g}"),
        "flips of routing": sum(int((a != b).any(-1).sum()) for a, b in pairs) if pairs else None,
    }


def _ready(name: str, head: str) -> tuple[nn.Module | None, str]:
    """The model, if it can be built tiny, samples be made for it, and packed rows be proven right; else why not."""
    try:
        model = tiny_model(name, head)
    except ConfigError as error:
        return None, f"not built: {error.seen}"[:200]
    unfed = why_unfed(model)
    if unfed:
        return None, f"not fed: {unfed}"
    return (model, "") if is_proven(model, "packed") else (None, "packed rows are not equal: verify names the module")


def trained(rows: Sequence[Row]) -> list[Row]:
    """Rows of models that were trained."""
    return [row for row in rows if "farthest" in row]


def problems(result: Mapping[str, Any]) -> list[str]:
    """Models whose losses part, unless a router chose otherwise."""
    rows = [row for row in trained(result["rows"]) if not row["farthest"] <= LIMIT and not row["flips of routing"]]
    return [f"{row['model']}: losses differ by {row['farthest']}" for row in rows]


BENCHMARK = Benchmark(
    name="packed_training",
    about=f"{__doc__}\n\nThe limit is {LIMIT} of the loss in every step.",
    options=TrainingOptions,
    cases=cases,
    methods=lambda options: ["packed against one by one"],
    prepare=prepare,
    measure=measure,
    summary=lambda rows: {
        "models": len(trained(rows)),
        "within the limit": sum(row["farthest"] <= LIMIT for row in trained(rows)),
        "farthest": max((row["farthest"] for row in trained(rows)), default=None),
    },
    problems=problems,
    libraries=("transformers",),
)
