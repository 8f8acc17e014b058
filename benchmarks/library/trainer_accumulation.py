"""The gradient of one update of a Hugging Face Trainer, alone and with TruebatchMixin, against one sample at a time.

Eight samples make one update, cut into 1, 2, 4 or 8 micro-batches. Tiny random models, fp32, no dropout.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.harness.benchmark import Benchmark, Options, Row
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.adapters.trainer import TruebatchMixin
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

HEADS = {
    "causal LM (llama)": ("llama", "causal_lm"),
    "token classification (bert)": ("bert", "token_classification"),
    "sequence classification (bert)": ("bert", "sequence_classification"),
    "masked LM (bert)": ("bert", "masked_lm"),
    "T5": ("t5", "seq2seq"),
    "BART": ("bart", "seq2seq"),
}
LENGTHS = [5, 9, 3, 14, 7, 6, 11, 4]
Sample = dict[str, Tensor]


class PlannedTrainer(TruebatchMixin, Trainer):
    """With planned steps and the exact loss."""


METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "Trainer": (Trainer, {}),
    "truebatch": (PlannedTrainer, {}),
    "truebatch, packed": (PlannedTrainer, {"truebatch": AdapterConfig(layout="packed")}),
}
LIMIT = 1e-6


class KeepGradient(TrainerCallback):
    """The gradient of the first update, as one vector."""

    gradient: Tensor

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.gradient = gradient_of(model)


def gradient_of(model: nn.Module) -> Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.detach().flatten().double() for part in parts])


def build(architecture: str, head: str) -> tuple[nn.Module, list[Sample]]:
    model = tiny_model(architecture, head)
    if head == "seq2seq" and getattr(model.config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = 0
    samples = [{k: torch.as_tensor(s[k]) for k in ("input_ids", "labels")} for s in make_samples(model, LENGTHS)]
    return model, samples


def pad(samples: list[Sample]) -> dict[str, Tensor]:
    """What a padding collator makes: right padding, a mask, labels of -100."""
    ids = [s["input_ids"] for s in samples]
    labels = [s["labels"] for s in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": torch.stack(labels) if labels[0].ndim == 0 else pad_sequence(labels, True, -100),
    }


def one_by_one(head: str, model: nn.Module, samples: list[Sample]) -> Tensor:
    """The gradient of the mean over all labels of the eight samples, each called alone."""
    model.zero_grad()
    totals, count = [], 0
    for sample in samples:
        alone = pad([sample])
        logits, labels = model(**alone).logits, alone["labels"]
        if head == "causal_lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        totals.append(functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    (torch.stack(totals).sum() / count).backward()
    return gradient_of(model)


def update(kind: type, names: tuple[str, str], accumulation: int, **extra: Any) -> Tensor:
    model, samples = build(*names)
    kept = KeepGradient()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(LENGTHS) // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        optimisers = (torch.optim.SGD(model.parameters(), lr=0.0), None)
        given = {"model": model, "args": args, "train_dataset": samples, "data_collator": pad}
        kind(**given, optimizers=optimisers, callbacks=[kept], **extra).train()
    return kept.gradient


def compare(found: Tensor, expected: Tensor) -> dict[str, float]:
    cosine = float(found @ expected / (found.norm() * expected.norm()))
    return {
        "relative_error": float((found - expected).norm() / expected.norm()),
        "norm_ratio": float(found.norm() / expected.norm()),
        "cosine": cosine,
    }


def prepare(options: Options, case: str) -> tuple[tuple[str, str], int, Tensor]:
    """The head, the number of micro-batches, and the gradient that is right."""
    title, _, accumulation = case.rpartition(", accumulation ")
    names = HEADS[title]
    return names, int(accumulation), one_by_one(names[1], *build(*names))


def measure(prepared: tuple[tuple[str, str], int, Tensor], method: str) -> Row | None:
    """The gradient of one update against one by one; rows are packed for causal models only."""
    names, accumulation, expected = prepared
    if method == "truebatch, packed" and names[1] != "causal_lm":
        return None
    kind, extra = METHODS[method]
    return compare(update(kind, names, accumulation, **extra), expected)


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """The worst of ours, and how far the Trainer's gradient is off in length."""
    ours = [row["relative_error"] for row in rows if row["method"] != "Trainer"]
    theirs = [row["norm_ratio"] for row in rows if row["method"] == "Trainer"]
    return {
        "largest_error_truebatch": max(ours, default=0.0),
        "largest_norm_ratio_trainer": max(theirs, default=1.0),
    }


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """An error of ours that fp32 does not explain."""
    rows = [row for row in result["rows"] if row["method"] != "Trainer" and not row["relative_error"] <= LIMIT]
    return [f"{row['case']}, {row['method']}: relative error {row['relative_error']:.1e}" for row in rows]


BENCHMARK = Benchmark(
    name="trainer_accumulation",
    about=__doc__,
    cases=lambda options: [f"{title}, accumulation {number}" for title in HEADS for number in (1, 2, 4, 8)],
    methods=lambda options: list(METHODS),
    prepare=prepare,
    measure=measure,
    summary=summarize,
    problems=find_problems,
    libraries=("transformers",),
)
