"""What several ranks do with coupled losses: run as a script, one process a rank."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.coupled.losses import FIELDS, LOSSES, SAMPLES, NoisyModel
from tests.training.coupled.test_coupled_step import Limited, engine_of, run
from truebatch.data.loader import load_steps
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.testing.failpoints import armed
from truebatch.training.data import TrainData, single_sample_batch_fn
from truebatch.training.distributed.collectives import num_ranks, rank
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, step_counts, take_gradients


def steps_of(engine, samples=SAMPLES):
    """Loss, counts and gradient of every step of an epoch; the last step has fewer samples than there are ranks."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    plan = build_plan(lengths, PlanConfig(samples_per_step=7, cells=40), ranks=num_ranks())
    found = []
    for step in load_steps(plan, samples, FIELDS, rank=rank()):
        counts = step_counts(step.batches, engine.objective, step.counts, device=torch.device("cpu"))
        outcome = take_gradients(engine, step.batches, counts, epoch=1)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in engine.model.parameters()]
        grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        found.append((outcome.loss, outcome.counts, torch.cat([g.flatten() for g in grads]).tolist()))
    return found


def sharded(objective):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = NoisyModel()
    fully_shard(model)
    groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))], model)
    data = TrainData(samples=SAMPLES, fields=FIELDS)
    stand_in = lambda: single_sample_batch_fn(data, epoch=0)(0)  # noqa: E731
    return StepEngine(model=model, objective=objective, groups=groups, seed=3, stand_in=stand_in)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    results = {name: steps_of(engine_of(loss())) for name, loss in LOSSES.items()}
    guard = OomGuard(fields=FIELDS)
    with armed("step.forward:oom:1") if rank() == 0 else nullcontext():
        results["out of memory"] = steps_of(engine_of(LOSSES["negatives"](), guard=guard))
    for with_graph in (False, True):
        guard = OomGuard(fields=FIELDS, when_too_large="quarantine")
        limited = Limited(28, with_graph=with_graph)
        results[f"quarantine {with_graph}"] = steps_of(engine_of(limited, guard=guard))
    results["run"] = run(out / "run", devices=num_ranks(), batch_size=2)[1].tolist()
    if num_ranks() == 2:
        results["sharded"] = steps_of(sharded(LOSSES["discrepancy"]()))
    dist.barrier()
    if rank() == 0:
        (out / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
