"""What two processes do in the tests of sharded checkpoints: run as a script, one process a rank."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.batch.keyed_random import KeyedDropout
from truebatch.errors import CheckpointError, RestartError, exit_code_of
from truebatch.testing.failpoints import armed
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.distributed.collectives import all_gather_list, num_ranks, rank
from truebatch.training.optim.param_groups import Group
from truebatch.training.trainer import train

TEXTS = text_samples([3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2], vocab=17)
STEPS = 6
OPTIMISERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9),
    "factored": lambda p: Factored(p, {"lr": 0.05}),
}


class Factored(torch.optim.Optimizer):
    """One number a row of a parameter, as Adafactor has (torch's own does not run on shards)."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            rows = p.grad.square() if p.ndim == 1 else p.grad.square().mean(1)
            rows = self.state[p].get("rows", 0 * rows) * 0.9 + rows * 0.1
            self.state[p]["rows"] = rows
            p -= self.param_groups[0]["lr"] * p.grad / (rows.sqrt() + 0.1).reshape(-1, *[1] * (p.ndim - 1))


class Model(TextModel):
    """Rows that two ranks cannot share evenly, dropout keyed by sample, and a frozen part."""

    def __init__(self):
        super().__init__(vocab=17)
        self.dropout = KeyedDropout(0.3)
        self.pos.weight.requires_grad_(False)

    def forward(self, batch):
        x = self.dropout(self.tok(batch["input_ids"]) + self.pos(batch.positions))
        return self.head(self.attention(x, batch.rows()))


def run(folder, steps=STEPS, *, shard, optimiser="momentum", **more):
    """A run of six steps, or a part of it."""
    torch.manual_seed(0)
    model = Model()
    if shard:
        fully_shard(model.attention)
        fully_shard(model)
    groups = [Group(optimiser=OPTIMISERS[optimiser]([p for p in model.parameters() if p.requires_grad]))]
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank())
    settings = {"epochs": 2, "samples_per_step": 4, "cells": 64, "save_every": 1, "keep": 9, **more}
    config = TrainConfig(devices=num_ranks(), max_steps=steps, **settings)
    return train(model, NextToken(), TrainData(samples=TEXTS, fields=TEXT_FIELDS), config, groups=groups, out=folder)


def parts(folder):
    return load_newest(folder / "checkpoints").checkpoint.parts


def attempt(work):
    """The exit code and words of an error, from every rank."""
    try:
        work()
    except (CheckpointError, RestartError) as error:
        return all_gather_list([(exit_code_of(error), str(error))])
    return all_gather_list([(0, "")])


def killed(out):
    """Rank 0 dies inside the save of a later step; the failpoint is in the environment."""
    run(out / "killed", shard=True, optimiser="adamw")


def rest(out):
    run(out / "killed", shard=True, optimiser="adamw")
    run(out / "from one", shard=True)
    for optimiser in OPTIMISERS:
        run(out / f"whole {optimiser}", shard=True, optimiser=optimiser)
        run(out / f"parts {optimiser}", 3, shard=True, optimiser=optimiser)
        run(out / f"parts {optimiser}", shard=True, optimiser=optimiser)
    run(out / "for one", 3, shard=True)
    run(out / "for plain", 3, shard=True)
    run(out / "for plain", shard=False)
    run(out / "half", shard=True, precision="fp16")
    with armed("checkpoint.file_written:enospc:9"):
        full = attempt(lambda: run(out / "full", shard=True))
    run(out / "full", shard=True)
    with armed("step.backward:oom:5"):
        memory = attempt(lambda: run(out / "memory", shard=True))
    run(out / "memory", shard=True)
    if rank() == 0:
        (out / "results.json").write_text(json.dumps({"full": full, "memory": memory}))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"killed": killed, "rest": rest}[sys.argv[1]](Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
