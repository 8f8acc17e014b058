"""The loss of a dataset without training on it: sums and counts over everything, divided once.

A loss that couples the samples of a step is taken over steps as large as those of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.fields import Field
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.torch_compile import force_eager
from truebatch.data.fetch import Dataset
from truebatch.data.loader import LoaderConfig, load_steps
from truebatch.errors import DataError
from truebatch.objective import CoupledObjective, add_counts
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.limits_table import limited_costs
from truebatch.planning.plan import Plan, build_plan
from truebatch.progress import counted
from truebatch.testing.failpoints import failpoint
from truebatch.training.checks.loss_terms import stand_in_of
from truebatch.training.data import measure_by_reading
from truebatch.training.distributed.collectives import (
    all_gather_list,
    names_over_ranks,
    num_ranks,
    rank,
    reshard,
    sum_numbers,
)
from truebatch.training.memory.oom import first_line, is_out_of_memory
from truebatch.training.memory.oom_retry import OomRetry
from truebatch.training.run_dir.watchdog import Watchdog
from truebatch.training.step import StepEngine, coupled_loss, sums_of


@dataclass(kw_only=True, slots=True, eq=False)
class ValidationSet:
    """Samples that are never trained on: measured and planned when they are first needed, once per run."""

    samples: Dataset
    fields: Sequence[Field]
    plan_config: PlanConfig
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    _plan: Plan | None = None

    def plan(self) -> Plan:
        """All of it, the same at every validation."""
        if self._plan is None:
            measured = measure_by_reading(self.samples, self.fields, what="validation dataset")
            self._plan = _plan_of(measured, self.plan_config)
        return self._plan


def evaluate_loss(
    engine: StepEngine, dataset: Dataset, measured: Measured, fields: Sequence[Field], plan_config: PlanConfig
) -> dict[str, float]:
    """Every loss term over the whole dataset, in eval mode; the same on every rank, however it is cut.

    A dataset without anything to count raises `DataError`.
    """
    plan = _plan_of(measured, plan_config)
    return validate(engine, ValidationSet(samples=dataset, fields=fields, plan_config=plan_config, _plan=plan))


def _plan_of(measured: Measured, plan_config: PlanConfig) -> Plan:
    if plan_config.atoms:  # as wide as those of training, unless a sample asks for more
        plan_config = replace(plan_config, cells=max(plan_config.cells or 0, int(measured.lengths.max())))
    return build_plan(measured.lengths, plan_config, ranks=num_ranks(), costs=limited_costs(measured, plan_config))


def validate(engine: StepEngine, data: ValidationSet, *, watchdog: Watchdog | None = None) -> dict[str, float]:
    """`evaluate_loss` of a run's validation samples. The watchdog learns of every micro-batch: a long validation is not a
    stuck run."""
    was_training = engine.model.training
    engine.model.eval()
    steps = load_steps(data.plan(), data.samples, data.fields, rank=rank(), config=data.loader)
    totals: dict[str, list[torch.Tensor]] = {}
    counts: dict[str, int] = {}
    try:
        with torch.no_grad(), force_eager():  # these rows are made to measure
            for step in counted(steps, "validating, steps", data.plan().num_steps):
                real = [batch for batch in step if batch.num_samples]
                counts = add_counts([counts, *(engine.objective.counts(batch) for batch in real)])
                # Where parameters are sharded, the other ranks need this one for every micro-batch.
                for sums in _sums_of_step(engine, list(step) if engine.is_sharded else real, watchdog):
                    for name, value in sums.items():
                        totals.setdefault(name, []).append(value)
            return _divide(totals, counts, engine.device)
    finally:
        steps.close()
        reshard(engine.model)
        engine.model.train(was_training)


def _sums_of_step(
    engine: StepEngine, batches: Sequence[MicroBatch], watchdog: Watchdog | None
) -> Iterator[Mapping[str, torch.Tensor]]:
    """The sums of every micro-batch; those of a loss that couples the samples of a step are of all ranks, given by rank 0."""
    if isinstance(engine.objective, CoupledObjective):
        if watchdog is not None:
            watchdog.beat("validation")
        loss = coupled_loss(engine, batches, epoch=0)
        yield loss if rank() == 0 else {}
        return
    for batch in batches:
        if watchdog is not None:
            watchdog.beat("validation")
        if batch.num_samples:
            yield _sums_of_batch(engine, batch)
        else:
            _forward(engine, stand_in_of(engine))


def _sums_of_batch(engine: StepEngine, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """What the objective sums up over a micro-batch, cut smaller where memory runs out, as in a step."""
    guard = None if engine.atoms is not None else engine.guard  # an atom is never cut
    retry = guard and OomRetry(guard, [batch], device=engine.device, is_sharded=engine.is_sharded, is_step=False)
    while True:
        part = batch
        try:
            sums: dict[str, torch.Tensor] = {}
            for part in retry.next_cut() if retry else [batch]:
                for name, value in _forward(engine, part).items():
                    sums[name] = sums.get(name, 0) + value.double()
            return sums
        except Exception as error:  # memory runs out in errors of many classes
            if not (retry and is_out_of_memory(error)):
                raise
            said = first_line(error)  # Only text leaves this block: the traceback holds the tensors of the try.
        retry.lower_budget(part, said)


def _forward(engine: StepEngine, batch: MicroBatch) -> Mapping[str, torch.Tensor]:
    failpoint("step.validation")
    moved = batch.to(engine.device, non_blocking=True)
    with noise_for(moved, seed=engine.seed), engine.autocast(), without_cudnn_sdpa(engine.device):
        return sums_of(engine, moved)


def _divide(totals: dict[str, list[torch.Tensor]], counts: dict[str, int], device: torch.device) -> dict[str, float]:
    """Totals are summed without rounding, so that no order of micro-batches or ranks changes them."""
    names = names_over_ranks(counts)
    mine = {n: torch.stack(totals[n]).to(torch.float64).tolist() if n in totals else [] for n in names}
    sums = {n: _exact_sum(all_gather_list(mine[n])) for n in names}
    numbers = sum_numbers([counts.get(n, 0) for n in names], device)
    summed = {n: (sums[n], float(count)) for n, count in zip(names, numbers, strict=True)}
    if not any(count for _total, count in summed.values()):
        raise DataError(
            "the validation dataset has nothing to measure a loss on",
            seen=f"a count of 0 for {', '.join(names) or 'every term'}",
            do="give validation samples with labels; a loss of 0 would pass for the best one",
        )
    return {name: total / max(count, 1.0) for name, (total, count) in summed.items()}


def _exact_sum(values: Sequence[float]) -> float:
    """NaN and infinity as adding them would give."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
