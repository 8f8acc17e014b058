"""A small task as a user would write it: `truebatch train tests/tasks.py:system`."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from truebatch import Field, Measured, System, Task, TrainData


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sentences of random numbers."""

    num_samples: int = 24
    width: int = 8
    stop_at: int = 0
    """Ask the process to stop when a sample is loaded for this time."""
    sleep_seconds: float = 0.0
    poison: int = -1
    """The loss of this sample is NaN."""


class Samples:
    """Random sentences; keeps count of how often one was loaded."""

    def __init__(self, config: Settings) -> None:
        rng = np.random.default_rng(0)
        self.items = [rng.integers(1, 20, n) for n in rng.integers(2, 30, config.num_samples)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, sample_id: int) -> dict:
        return {"x": self.items[sample_id]}


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, width), nn.Linear(width, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).tanh())


class NextNumber:
    """Cross entropy of the next number, summed."""

    def __init__(self, poison: int) -> None:
        self.poison = poison

    def counts(self, batch):
        return {"nll": int((batch["y"] >= 0).sum())}

    def sums(self, model, batch):
        logits = model(batch["x"]).flatten(0, 1)
        total = F.cross_entropy(logits, batch["y"].flatten(), ignore_index=-100, reduction="sum")
        return {"nll": total * float("nan") if self.poison in batch.sample_ids else total}


def measure(samples):
    return Measured(lengths=np.array([len(samples[i]["x"]) for i in range(len(samples))], dtype=np.int64))


def build(config):
    torch.manual_seed(0)
    return Model(config.width)


def stopping(config):
    import time

    seen = [0]

    def transform(sample, sample_id, epoch):
        seen[0] += 1
        time.sleep(config.sleep_seconds)
        if seen[0] == config.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return sample

    return transform


def save(model, folder):
    torch.save(model.state_dict(), folder / "weights.pt")


FIELDS = [Field(name="x"), Field(name="y", source="x", shift=1, pad=-100)]


def prepare(config: Settings) -> Task:
    return Task(
        data=TrainData(samples=Samples(config), fields=FIELDS, transform=stopping(config)),
        measure=measure,
        build_model=lambda: build(config),
        objective=NextNumber(config.poison),
        save=save,
    )


system = System(name="numbers", config_type=Settings, prepare=prepare)
number = 3
