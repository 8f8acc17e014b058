"""Figures of a model trained by `train hf` on held-out samples: loss and perplexity, or accuracy and F1 of its classes.

samples -> planned micro-batches -> what the head says of each sample -> predictions.jsonl, figures
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.data.loader import load_steps
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.heads.heads import ModelHead
from truebatch.hf.heads.losses import IGNORE
from truebatch.hf.heads.objective import HeadObjective
from truebatch.io.atomic_files import atomic_text
from truebatch.planning.limits_table import limited_costs
from truebatch.planning.plan import build_plan
from truebatch.training.data import measure_by_reading
from truebatch.training.distributed.device import find_own_device
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.step import StepEngine
from truebatch.training.system import SizedDataset
from truebatch.training.validation import evaluate_loss

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True, slots=True)
class ClassifiedSample:
    """What the model says of one sample, and what is right; one entry, or one for each labelled token."""

    sample_id: int
    predicted: tuple[int, ...]
    labels: tuple[int, ...]


def evaluate(
    config: FinetuneConfig, head: ModelHead, names: Sequence[str], model: nn.Module, samples: SizedDataset, out: Path
) -> Mapping[str, Any]:
    """Loss of everything; perplexity of a model that writes, accuracy and macro F1 of one that classifies."""
    place = find_own_device(config.train)
    model.to(place.device).eval()
    measured = measure_by_reading(samples, head.fields, what="held-out dataset")
    plan_config = replace(config.train, exactness="rounding", atom_cells=None).plan_config()
    engine = StepEngine(
        model=model, objective=HeadObjective(head=head), groups=(), device=place.device, autocast=place.autocast,
        guard=OomGuard(fields=head.fields),
    )  # fmt: skip
    loss = evaluate_loss(engine, samples, measured, head.fields, plan_config)[head.loss.term]
    if not config.task.endswith("classification"):
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    plan = build_plan(measured.lengths, plan_config, costs=limited_costs(measured, plan_config))
    with closing(load_steps(plan, samples, head.fields)) as steps:
        found = [one for step in steps for batch in step for one in _classify(engine, head, batch)]
    found.sort(key=lambda one: one.sample_id)
    _write(out / PREDICTIONS, found, names)
    return {"loss": loss, **_figures(found)}


@torch.no_grad()
def _classify(engine: StepEngine, head: ModelHead, batch: Any) -> Iterator[ClassifiedSample]:
    moved = batch.to(engine.device)
    with engine.autocast():
        logits = HeadObjective(head=head).outputs(engine.model, moved)["logits"]
    labels = batch.per_sample(batch["labels"], head.kind.axis)
    for sample_id, own, right in zip(batch.sample_ids, logits, labels, strict=True):
        predicted, right = own.argmax(-1).reshape(-1).cpu(), right.reshape(-1)
        is_labelled = right != IGNORE
        yield ClassifiedSample(int(sample_id), _numbers(predicted[is_labelled]), _numbers(right[is_labelled]))


def _numbers(values: Tensor) -> tuple[int, ...]:
    return tuple(int(value) for value in values.tolist())


def _figures(found: Sequence[ClassifiedSample]) -> dict[str, float]:
    """Accuracy, and F1 averaged over the classes that occur."""
    predicted = np.array([value for one in found for value in one.predicted], dtype=np.int64)
    labels = np.array([value for one in found for value in one.labels], dtype=np.int64)
    scores = []
    for label in np.unique(labels):
        hits = int(((predicted == label) & (labels == label)).sum())
        scores.append(2 * hits / int((predicted == label).sum() + (labels == label).sum()))
    return {"accuracy": float((predicted == labels).mean()), "macro_f1": float(np.mean(scores))}


def _write(file: Path, found: Sequence[ClassifiedSample], names: Sequence[str]) -> None:
    with atomic_text(file) as out:
        for one in found:
            said = {"predicted": [names[at] for at in one.predicted], "label": [names[at] for at in one.labels]}
            out.write(json.dumps({"sample": one.sample_id, **said}, ensure_ascii=False) + "\n")
