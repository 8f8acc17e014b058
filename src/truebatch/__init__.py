"""Batches that do not change the answer.

Names are imported on first use, so planning never waits for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME: dict[str, str] = {
    "CoupledObjective": "objective",
    "Field": "batch.fields",
    "KeyedDropout": "batch.keyed_random",
    "Measured": "planning.lengths.measured_values",
    "MicroBatch": "batch.microbatch",
    "Objective": "objective",
    "Plan": "planning.plan",
    "PlanConfig": "planning.config",
    "Rows": "planning.rows",
    "Scorer": "scoring.scorer",
    "System": "training.system",
    "Task": "training.system",
    "TokenBudgetSampler": "data.token_budget_sampler",
    "TrainConfig": "training.config",
    "TrainData": "training.data",
    "TruebatchError": "errors",
    "VerifyConfig": "verification.config",
    "assert_batchable": "verification.api",
    "attend": "attention.api",
    "attend_across": "attention.cross",
    "build_plan": "planning.plan",
    "choose_layout": "verification.choose_layout",
    "collate": "batch.collate",
    "collate_packed": "batch.collate_packed",
    "key_dropout": "batch.key_dropout",
    "load_plan": "planning.plan_file",
    "load_steps": "data.loader",
    "logprobs": "hf.preference.logprobs",
    "measure": "planning.lengths.measure",
    "register": "hf.attention.registration",
    "reward": "hf.preference.reward",
    "save_plan": "planning.plan_file",
    "step_loss": "adapters.step_loss",
    "train": "training.trainer",
    "verify": "verification.api",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"truebatch has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"truebatch.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


for _names in ("hf.attention.registration", "adapters.lm_eval_name"):
    import_module(f"truebatch.{_names}").watch_imports()
