"""A loop with torch's own DataLoader, in planned steps: which micro-batches share an update, and what divides their loss.

>>> import torch
>>> from torch.utils.data import DataLoader
>>> from truebatch import PlanConfig, build_plan
>>> from truebatch.adapters.step_loss import step_loss
>>> from truebatch.hf.heads.heads import head_of
>>> from truebatch.hf.heads.objective import HeadObjective
>>> from truebatch.testing.tiny_hf.random_samples import make_samples
>>> from truebatch.testing.tiny_hf.model import tiny_model
>>> from truebatch.data.torch_dataloader import batch_sampler, collate_fn, planned_samples
>>> model = tiny_model("llama")
>>> dataset, head = make_samples(model, [3, 9, 4, 7, 5]), head_of(model)

>>> optimiser, lengths = torch.optim.AdamW(model.parameters()), [len(s["input_ids"]) for s in dataset]
>>> for epoch in range(2):
...     plan = build_plan(lengths, PlanConfig(samples_per_step=3, cells=16), epoch=epoch)
...     loader = DataLoader(
...         planned_samples(dataset, epoch=epoch), batch_sampler=batch_sampler(plan), collate_fn=collate_fn(head.fields)
...     )
...     for step in whole_steps(loader, plan):
...         step_loss(model, HeadObjective(head=head), step, epoch=epoch).backward()
...         optimiser.step()
...         optimiser.zero_grad()
...         print(epoch, step.number, sum(batch.num_samples for batch in step))
0 0 3
0 1 2
1 0 3
1 1 2

A rank passes `rank=` and `ranks=` to `batch_sampler` and to `whole_steps`; a run that goes on passes `start_step=` to both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import LoadedStep, check_place
from truebatch.errors import BatchError
from truebatch.planning.plan import Plan


def whole_steps(
    loader: Iterable[MicroBatch], plan: Plan, *, rank: int = 0, ranks: int | None = None, start_step: int = 0
) -> Iterator[LoadedStep]:
    """The micro-batches of a DataLoader, step by step; `rank`, `ranks` and `start_step` as given to `batch_sampler`.

    Micro-batches that are not those of the plan are refused, so an update can never be made of the wrong samples.
    """
    check_place(plan, rank, ranks, start_step)
    batches = iter(loader)
    for number in range(start_step, plan.num_steps):
        rows = plan.step(number, ranks=ranks)[rank]
        found = tuple(islice(batches, len(rows)))
        ids = [batch.sample_ids for batch in found]
        planned = [tuple(row.ids.tolist()) for row in rows]
        if ids != planned:
            raise BatchError(
                f"the loader does not give the micro-batches of step {number}",
                seen=f"samples {ids[:3]} from the loader, {planned[:3]} in the plan",
                do="give batch_sampler and whole_steps the same plan, rank, ranks and start_step",
            )
        yield LoadedStep(number, found, plan.step_counts(number))
