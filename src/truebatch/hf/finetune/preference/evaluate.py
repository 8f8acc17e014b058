"""Figures of a model trained on pairs, on held-out ones: loss, share of pairs the right way round, margin.

samples -> planned micro-batches -> two numbers of each pair -> predictions.jsonl, figures
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import load_steps
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.evaluate import PREDICTIONS
from truebatch.hf.finetune.preference.objective import TERM, PairObjective
from truebatch.hf.finetune.preference.pair_rows import PARTS
from truebatch.io.atomic_files import atomic_text
from truebatch.planning.plan import build_plan
from truebatch.training.data import measure_by_reading
from truebatch.training.distributed.device import find_device
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.step import StepEngine
from truebatch.training.system import SizedDataset
from truebatch.training.validation import evaluate_loss

FIELDS = (Field(name="input_ids", dtype="int64"), Field(name=PARTS, kind="once", dtype="int64", host=True))
"""Of a pair."""


def evaluate_pairs(
    config: FinetuneConfig, objective: PairObjective, model: nn.Module, samples: SizedDataset, out: Path
) -> Mapping[str, Any]:
    """The loss of pairs, accuracy (the chosen answer has the higher reward) and the mean margin of rewards."""
    place = find_device(config.train)
    model.to(place.device).eval()
    measured = measure_by_reading(samples, FIELDS, what="held-out dataset")
    plan_config = replace(config.train, exactness="rounding", atom_cells=None).plan_config()
    engine = StepEngine(
        model=model, objective=objective, groups=(), device=place.device, autocast=place.autocast,
        guard=OomGuard(fields=FIELDS),
    )  # fmt: skip
    loss = evaluate_loss(engine, samples, measured, FIELDS, plan_config)[TERM]
    plan = build_plan(measured.lengths, plan_config, costs=measured.costs)
    found: list[tuple[int, float, float]] = []
    with closing(load_steps(plan, samples, FIELDS)) as steps:
        for batch in (batch for step in steps for batch in step):
            found += _rewards(engine, objective, batch)
    found.sort()
    with atomic_text(out / PREDICTIONS) as file:
        for sample_id, chosen, rejected in found:
            file.write(json.dumps({"sample": sample_id, "chosen": chosen, "rejected": rejected}) + "\n")
    margins = [chosen - rejected for _, chosen, rejected in found]
    return {
        "loss": loss,
        "accuracy": sum(margin > 0 for margin in margins) / len(margins),
        "margin": sum(margins) / len(margins),
    }


@torch.no_grad()
def _rewards(engine: StepEngine, objective: PairObjective, batch: MicroBatch) -> list[tuple[int, float, float]]:
    moved = batch.to(engine.device)
    with engine.autocast(), objective.hold(engine.model, moved):
        rewards = objective.implied_rewards(engine.model, moved).tolist()
    return [(int(at), chosen, rejected) for at, (chosen, rejected) in zip(batch.sample_ids, rewards, strict=True)]
