"""What two processes do in the tests of several processes: run as a script, one process a rank."""

import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.tiny import SETS_FIELDS, TEXT_FIELDS, NextToken, SetRisk, SetsModel, TextModel, set_samples, text_samples
from tests.training.optim.test_nonfinite import CHECKED, POLICIES, SOURCES
from tests.training.optim.test_nonfinite import SAMPLES as BAD_SAMPLES
from truebatch.data.loader import load_steps
from truebatch.errors import DataError, NonFiniteError, RestartError, exit_code_of
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.testing.failpoints import armed
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, measure_by_reading, single_sample_batch_fn
from truebatch.training.distributed.collectives import all_gather_list, num_ranks, rank
from truebatch.training.memory.oom_retry import OomGuard, read_budget
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, step_counts, take_gradients
from truebatch.training.trainer import train

TEXTS = text_samples([3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2])
STAYS = set_samples([[2, 5, 1], [1], [7, 3, 9, 2], [4, 4], [25, 1], [3], [2, 2]])
CASES = {
    "text": (TextModel, NextToken, TEXT_FIELDS, TEXTS),
    "sets": (SetsModel, SetRisk, SETS_FIELDS, STAYS),
}


HEADS = {
    "causal_lm": ("llama", ("padded", "packed")),
    "token_classification": ("bert", ("padded", "packed")),
    "sequence_classification": ("bert", ("padded",)),
    "masked_lm": ("bert", ("padded", "packed")),
    "t5": ("t5", ("padded",)),
    "bart": ("bart", ("padded",)),
}


def head_gradients(name, layout, cells):
    """The gradient of one step of a Hugging Face head, cut into micro-batches of at most `cells` cells."""
    kind, _ = HEADS[name]
    model = tiny_model(kind, "seq2seq" if name in ("t5", "bart") else name)
    samples = make_samples(model, [5, 19, 9, 2, 13, 7, 11, 4])
    objective = HeadObjective(head=head_of(model))
    groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))], model)
    engine = StepEngine(model=model, objective=objective, groups=groups)
    lengths = [len(sample["input_ids"]) for sample in samples]
    plan = build_plan(lengths, PlanConfig(layout=layout, samples_per_step=8, cells=cells), ranks=num_ranks())
    (step,) = load_steps(plan, samples, objective.head.fields, rank=rank())
    counts = step_counts(step.batches, objective, step.counts, device=torch.device("cpu"))
    take_gradients(engine, step.batches, counts, epoch=0)
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def engine_of(kind, objective):
    torch.manual_seed(0)
    model = kind()
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))]
    return StepEngine(model=model, objective=objective(), groups=make_groups(groups, model))


class Limited(NextToken):
    """Runs out of memory when a micro-batch has more cells than fit."""

    def __init__(self, limit):
        self.limit = limit

    def sums(self, model, batch):
        if batch.segments.num_cells > self.limit:
            raise MemoryError
        return super().sums(model, batch)


def gradients(case, layout, *, shard=False, guard=None, limit=None):
    """The gradient of every step of an epoch, the last one shorter than the ranks can share evenly."""
    kind, objective, fields, samples = CASES[case]
    engine = replace(engine_of(kind, objective), guard=guard)
    if limit is not None:
        engine = replace(engine, objective=Limited(limit))
    if shard:
        from torch.distributed.fsdp import fully_shard

        fully_shard(engine.model)
        groups = [Group(optimiser=torch.optim.SGD(engine.model.parameters(), 0.3))]
        engine = StepEngine(
            model=engine.model,
            objective=objective(),
            groups=make_groups(groups, engine.model),
            guard=guard,
            stand_in=lambda: single_sample_batch_fn(TrainData(samples=samples, fields=fields), epoch=0)(0),
        )
    lengths = measure_by_reading(samples, fields).lengths
    limits = {"cells": 40} if "cells" in {f.axis for f in fields} else {"samples": 2}
    plan = build_plan(lengths, PlanConfig(layout=layout, samples_per_step=5, **limits), ranks=num_ranks())
    found = []
    for step in load_steps(plan, samples, fields, rank=rank()):
        counts = step_counts(step.batches, engine.objective, step.counts, device=torch.device("cpu"))
        outcome = take_gradients(engine, step.batches, counts, epoch=0)
        parts = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in engine.model.parameters()]
        found.append((outcome.loss, outcome.counts, torch.cat([g.flatten() for g in parts])))
    return found


def out_of_memory():
    """Memory runs out on one rank, on either, and for a sample alone; the other rank only does its own part."""
    results = {}
    for at in range(2):
        guard = OomGuard(fields=TEXT_FIELDS)
        with armed("step.backward:oom:2") if rank() == at else nullcontext():
            found = gradients("text", "padded", guard=guard)
        results[f"out of memory on rank {at}"] = [(x, y, g.tolist()) for x, y, g in found]
        results[f"recoveries {at}"] = all_gather_list([guard.recoveries])
    limited = OomGuard(fields=TEXT_FIELDS)
    results["limited"] = [(x, y, g.tolist()) for x, y, g in gradients("text", "packed", guard=limited, limit=33)]
    left_out = OomGuard(fields=TEXT_FIELDS, when_too_large="quarantine")
    results["quarantine"] = [(x, y, g.tolist()) for x, y, g in gradients("text", "padded", guard=left_out, limit=28)]
    results["quarantined"] = all_gather_list([sorted(left_out.quarantined)])
    return results


def sharded_out_of_memory(folder):
    """Every rank saves the budget and leaves; begun again, the ranks make equally many micro-batches of their own."""
    folder.mkdir(exist_ok=True)
    guard = OomGuard(fields=TEXT_FIELDS, folder=folder)
    said = ""
    with armed("step.forward:oom:1"):
        try:
            gradients("text", "padded", shard=True, guard=guard)
        except RestartError as error:
            said = f"{exit_code_of(error)} {error.wrong}"
    dist.barrier()
    again = OomGuard(fields=TEXT_FIELDS, folder=folder)
    read_budget(again)
    found = gradients("text", "padded", shard=True, guard=again)
    return said, again.cells, [(x, y, g.tolist()) for x, y, g in found]


def run(folder, steps, *, stop_after=None):
    """A part of a run that was planned for six steps."""
    torch.manual_seed(0)
    model = TextModel()
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))]
    seen = []

    def transform(sample, sample_id, epoch):
        seen.append(sample_id)
        if stop_after is not None and rank() == stop_after and len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return sample

    config = TrainConfig(epochs=2, samples_per_step=4, cells=64, devices=num_ranks(), max_steps=steps)
    data = TrainData(samples=TEXTS, fields=TEXT_FIELDS, transform=transform)
    result = train(model, NextToken(), data, config, groups=groups, out=folder)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"step": result.step, "exit_code": result.exit_code, "weights": weights.tolist()}


def run_bits(folder, steps):
    """A part of a run whose steps have the same bits on any number of ranks: digests and losses of its steps."""
    torch.manual_seed(0)
    config = TrainConfig(
        epochs=2, samples_per_step=4, exactness="bits", digest_every=1, devices=num_ranks(), max_steps=steps,
        layout="packed",
    )  # fmt: skip
    data = TrainData(samples=TEXTS, fields=TEXT_FIELDS, validation=TEXTS[:5])
    result = train(TextModel(), NextToken(), data, config, out=folder)
    return [(r["digest"], r["loss"], r["grad_norm/main"]) for r in result.records], result.best_loss


class Stream:
    """Read from its beginning only; the same samples on every rank, unless it is dealt out."""

    def __init__(self, is_dealt=False):
        self.is_dealt = is_dealt

    def __iter__(self):
        return iter(TEXTS[rank() :: num_ranks()] if self.is_dealt else TEXTS)


def run_stream(folder, *, is_dealt=False):
    """Steps of a stream, in windows of two steps; or why it was refused."""
    torch.manual_seed(0)
    model = TextModel()
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))]
    config = TrainConfig(samples_per_step=4, window=8, cells=64, devices=num_ranks(), max_steps=7)
    try:
        train(
            model,
            NextToken(),
            TrainData(samples=Stream(is_dealt), fields=TEXT_FIELDS),
            config,
            groups=groups,
            out=folder,
        )
    except DataError as error:
        return error.wrong
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def run_bad(folder, source, policy):
    """A short run with something that is not finite; what it came to on this rank."""
    kind, objective, optimiser = SOURCES[source]
    torch.manual_seed(0)
    model = kind()
    config = TrainConfig(
        epochs=1, samples_per_step=4, devices=num_ranks(), nonfinite=policy, nonfinite_limit=2, save_every=1, keep=9,
        check_samples=CHECKED.get(source, 8),
    )  # fmt: skip
    groups = [Group(optimiser=optimiser(model.parameters(), 0.1))]
    try:
        train(model, objective(), TrainData(samples=BAD_SAMPLES, fields=TEXT_FIELDS), config, groups=groups, out=folder)
        ended = "done"
    except NonFiniteError:
        ended = "raised"
    good = load_newest(folder / "checkpoints")
    saved = (
        True if good is None else all(bool(torch.isfinite(t).all()) for t in good.checkpoint.parts["model"].values())
    )
    return {"ended": ended, "finite": all(bool(torch.isfinite(p).all()) for p in model.parameters()), "saved": saved}


def main(out):
    dist.init_process_group("gloo")
    results = {}
    for case in CASES:
        for layout in ("padded", "packed"):
            results[f"{case} {layout}"] = [(x, y, g.tolist()) for x, y, g in gradients(case, layout)]
    for name, (_, layouts) in HEADS.items():
        for layout in layouts:
            for cells in (20, 40):
                results[f"{name} {layout} {cells}"] = head_gradients(name, layout, cells).tolist()
    results["sharded"] = [(x, y, g.tolist()) for x, y, g in gradients("text", "padded", shard=True)]
    results |= out_of_memory()
    results["sharded, out of memory"] = sharded_out_of_memory(out / "sharded")
    for source in SOURCES:
        for policy in POLICIES:
            mine = run_bad(out / f"bad {source} {policy}", source, policy)
            every = [None, None]
            dist.all_gather_object(every, mine)
            results[f"bad {source} {policy}"] = every
    results["whole"] = run(out / "whole", 6)
    results["second part"] = run(out / "parts", 4)
    results["stopped"] = run(out / "stopped", 6, stop_after=1)
    results["bits"] = run_bits(out / "bits", 6)
    results["bits, second part"] = run_bits(out / "bits parts", 6)
    results["stream"] = run_stream(out / "stream")
    results["dealt stream"] = run_stream(out / "dealt", is_dealt=True)
    dist.barrier()
    if rank() == 0:
        (out / "results.json").write_text(json.dumps(results))
    assert np.isfinite(results["whole"]["weights"]).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
