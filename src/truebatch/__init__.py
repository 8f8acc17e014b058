"""Batches that do not change the answer.

Names are imported on first use, so planning never waits for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME: dict[str, str] = {
    "Field": "tensors.field",
    "KeyedDropout": "tensors.noise",
    "Measured": "planning.measured",
    "MicroBatch": "tensors.microbatch",
    "Objective": "objective",
    "Plan": "planning.plan",
    "PlanConfig": "planning.settings",
    "Rows": "planning.rows",
    "Scorer": "scoring.scorer",
    "System": "system",
    "TrainConfig": "training.settings",
    "TrainData": "training.task",
    "TruebatchError": "errors",
    "VerifyConfig": "proof.settings",
    "assert_batchable": "proof.verification",
    "build_plan": "planning.plan",
    "choose_layout": "proof.layouts",
    "collate": "tensors.collating",
    "load_plan": "planning.files",
    "load_steps": "tensors.loader",
    "measure": "planning.measuring",
    "save_plan": "planning.files",
    "train": "training.loop",
    "verify": "proof.verification",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"truebatch has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"truebatch.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
