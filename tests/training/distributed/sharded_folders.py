"""What two and four processes do in the tests of `train hf --shard`: run as a script, one process a rank."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.system import FINETUNING
from truebatch.training.config import TrainConfig
from truebatch.training.data import single_sample_batch_fn
from truebatch.training.distributed.collectives import num_ranks, rank
from truebatch.training.distributed.device import find_device
from truebatch.training.distributed.fsdp import shard_model
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, step_counts, take_gradients
from truebatch.training.train_system import Start, train_system

STEPS = 4


def run(out, name, *, steps=STEPS, shard=True, **more):
    """A run of `train hf` on the folder that the test has made, or a part of it."""
    settings = {"samples_per_step": 6, "epochs": 9, "save_every": 1, "keep": 9, "layout": "packed", "cells": 64}
    train = TrainConfig(**settings, max_steps=steps, devices=num_ranks(), shard=shard, check_samples=2)
    config = FinetuneConfig(
        model=out / "model", data=out / "chats.jsonl", validation=out / "held_out.jsonl", task="causal_lm",
        train=train, **more,
    )  # fmt: skip
    return train_system(FINETUNING, config, Start(out=out / name))


def gradient(out, *, shard):
    """The gradient of one step of all samples, whole, on every rank."""
    config = FinetuneConfig(model=out / "model", data=out / "chats.jsonl", task="causal_lm")
    if shard:
        config = replace(config, train=TrainConfig(devices=num_ranks(), shard=True))
    task = FINETUNING.prepare(config)
    model, alone = task.build_model().train(), single_sample_batch_fn(task.data, epoch=0)
    if shard:
        shard_model(model, find_device(config.train).device)
    groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))], model)
    engine = StepEngine(model=model, objective=task.objective, groups=groups, stand_in=lambda: alone(0))
    batches = [alone(at) for at in range(rank(), len(task.data.samples), num_ranks())]
    take_gradients(engine, batches, step_counts(batches, engine.objective, {}, device=engine.device), epoch=0)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def keep_gradient(out):
    found = gradient(out, shard=True)
    if rank() == 0:
        torch.save(found, out / f"gradient-{num_ranks()}.pt")


def two(out):
    keep_gradient(out)
    run(out, "by two")
    run(out, "two then one", steps=2)
    run(out, "two then four", steps=2)
    run(out, "lora by two", lora=True)
    run(out, "one then two")


def four(out):
    keep_gradient(out)
    run(out, "two then four")
    run(out, "lora by four", lora=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    {"two": two, "four": four}[sys.argv[1]](Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
