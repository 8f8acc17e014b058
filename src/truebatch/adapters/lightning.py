"""Planned steps and the exact loss inside Lightning: each `training_step` is one planned step.

class Net(LightningModule):
    def training_step(self, step, batch_idx):
        return lightning_loss(self, self.model, self.objective, step)

Trainer(...).fit(Net(), PlannedDataModule(plan_data(dataset, collator, model, PlanConfig(samples_per_step=64))))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from truebatch.adapters.planned_batches import PlannedData
from truebatch.adapters.step_loss import step_loss
from truebatch.data.loader import LoadedStep, LoaderConfig
from truebatch.errors import ConfigError, RunError
from truebatch.hf.heads.objective import HeadObjective
from truebatch.objective import Objective
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.step import StepEngine
from truebatch.training.validation import evaluate_loss

_log = logging.getLogger(__name__)

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
"""Lightning strategies under which the gradient is known to be exact."""


class PlannedStep:
    """What a `training_step` gets. Lightning passes it on unchanged; its micro-batches move to the device one by
    one."""

    def __init__(self, loaded: LoadedStep, epoch: int, seed: int, guard: OomGuard | None = None) -> None:
        self.loaded, self.epoch, self.seed, self.guard = loaded, epoch, seed, guard


class PlannedDataModule(LightningDataModule):  # type: ignore[misc]
    """The planned steps of a dataset as Lightning's training data. A checkpoint records the step to resume with."""

    def __init__(self, data: PlannedData, *, loader: LoaderConfig | None = None) -> None:
        super().__init__()
        self.data, self.loader = data, loader or LoaderConfig()

    def train_dataloader(self) -> StepLoader:
        """One planned step per item."""
        refuse_trainer(self.trainer)
        return StepLoader(self.data, self.trainer, self.loader)


class StepLoader:
    """The steps of the trainer's current epoch, resumable in the middle: a step is found by its number."""

    def __init__(self, data: PlannedData, trainer: Any, config: LoaderConfig) -> None:
        self.data, self.trainer, self.config = data, trainer, config
        self.guard = OomGuard(fields=data.head.fields, say=_log.warning)
        self.start: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.data.num_steps

    def __iter__(self) -> Iterator[PlannedStep]:
        epoch, number = self.start or (int(self.trainer.current_epoch), 0)
        self.start = None
        steps = self.data.load(
            epoch,
            rank=self.trainer.global_rank,
            ranks=self.trainer.world_size,
            start_step=number,
            config=self.config,
        )
        return (PlannedStep(step, epoch, self.data.config.seed, self.guard) for step in steps)

    def state_dict(self) -> dict[str, Any]:
        """The next step. Counts finished steps, not fetched ones: Lightning prefetches."""
        done = int(self.trainer.fit_loop.epoch_loop.batch_progress.current.processed)
        epoch = int(self.trainer.current_epoch) + done // len(self)
        return {"epoch": epoch, "step": done % len(self), "identity": self.data.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the step of a checkpoint; one made with other steps is rejected."""
        if state["identity"] != self.data.identity():
            raise RunError(
                "the checkpoint was made with other steps, so its number of steps means other samples",
                seen=f"{state['identity']} in the checkpoint, {self.data.identity()} now",
                do="keep the data, the seed and samples_per_step",
            )
        self.start = state["epoch"], state["step"]


def lightning_loss(module: LightningModule, model: nn.Module, objective: Objective, step: PlannedStep) -> Tensor:
    """The true loss of the step: return it from `training_step`, or give it to `manual_backward`. Both are exact.

    Out of memory only changes how the step is cut.
    """
    return step_loss(
        model, objective, step.loaded, device=module.device, epoch=step.epoch, seed=step.seed, guard=step.guard
    )


def lightning_eval_loss(module: LightningModule, model: nn.Module, data: PlannedData) -> float:
    """The loss of a whole dataset, divided once over all of it and all ranks; call it from an epoch-end hook."""
    engine = StepEngine(
        model=model,
        objective=HeadObjective(head=data.head),
        groups=(),
        device=module.device,
        autocast=module.trainer.precision_plugin.forward_context,
        seed=data.config.seed,
    )
    with torch.no_grad():
        return sum(evaluate_loss(engine, data.samples, data.measured, data.head.fields, data.config).values())


def refuse_trainer(trainer: Any) -> None:
    """Raise ConfigError for settings of a Trainer under which a step would not be one planned step."""
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            "a planned step is complete: several of them are not one",
            seen=f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            do="set it to 1 and plan more samples_per_step; memory is limited by PlanConfig(cells=...)",
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigError(
            "the gradient of a step is taken before Lightning scales the loss, so fp16 would lose small values",
            seen=f"precision={trainer.precision!r}",
            do="use precision='bf16-mixed' or '32-true'",
        )
    strategy = type(trainer.strategy).__name__
    if strategy not in STRATEGIES:
        raise ConfigError(
            "this strategy is not proven to compute the gradient of the step",
            seen=f"strategy {strategy}",
            do=f"use one of {', '.join(STRATEGIES)}",
        )
