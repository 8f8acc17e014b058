"""Temperature and weights of the losses as closed forms of one number: the share of the run that is done."""

from __future__ import annotations

import math
from dataclasses import dataclass

from truebatch_systems.vlm_pruning.config import MethodSettings


@dataclass(frozen=True, slots=True)
class Moment:
    """What is scheduled, at one moment of a run."""

    temperature: float
    task: float
    adversarial: float
    budget: float


def progress_of(step: int, num_steps: int) -> float:
    """The share of a run that is done before `step`, from 0 to 1."""
    return min(max(step / max(num_steps, 1), 0.0), 1.0)


def moment_at(method: MethodSettings, progress: float) -> Moment:
    """Everything that is scheduled, when this share of the run is done."""
    return Moment(
        temperature=temperature_at(method, progress),
        task=_ramp(method.task_loss_weight_start, method.task_loss_weight, method.loss_weight_warmup_ratio, progress),
        adversarial=_ramp(
            method.adv_loss_weight_start, method.adv_loss_weight, method.loss_weight_warmup_ratio, progress
        ),
        budget=_budget_weight(method, progress),
    )


def temperature_at(method: MethodSettings, progress: float) -> float:
    """A line from `temperature` down to `temperature_min` over the first part of the run, then constant."""
    rate = method.temperature_anneal_rate
    done = 1.0 if rate == 0 else min(progress / rate, 1.0)
    return method.temperature + (method.temperature_min - method.temperature) * done


def _ramp(start: float | None, end: float, over: float, progress: float) -> float:
    """Half a cosine from start to end over the first part of the run."""
    if start is None or over == 0 or progress >= over:
        return end
    return start + (end - start) * (1 - math.cos(math.pi * progress / over)) / 2


def _budget_weight(method: MethodSettings, progress: float) -> float:
    most, over = method.sparsity_weight_max, method.sparsity_warmup_ratio
    if most is None or over == 0:
        return method.sparsity_weight
    return method.sparsity_weight + (most - method.sparsity_weight) * min(progress / over, 1.0)
