"""What a run would take before it begins: memory and, where it was measured, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from truebatch.errors import TruebatchError
from truebatch.planning.limits_table import limited_costs
from truebatch.planning.plan import Plan, build_plan
from truebatch.planning.rows import Layout, Rows
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.memory.batch_size_table import open_engine
from truebatch.training.memory.cost_model import MemoryFit, changed_facts, load_fit
from truebatch.training.memory.fake_tensor_estimate import estimate_added
from truebatch.training.memory.fit import constant_bytes, fit_facts, make_batch, sizes_of
from truebatch.training.memory.measure import free_bytes_of
from truebatch.training.step import StepEngine
from truebatch.training.system import Task

MOST_STEPS = 256
"""Steps of a plan that are looked through for the largest micro-batch."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """What is foreseen for one layout."""

    memory_bytes: int
    """At the peak of a step, model and optimiser included."""
    seconds: float | None
    """For all samples once; None where no fit that holds was timed."""
    how: str
    """fit or estimate."""


def estimate_run(
    task: Task, config: TrainConfig, *, layouts: Sequence[Layout], folder: Path
) -> tuple[dict[Layout, RunEstimate | str], int] | str:
    """For each layout what a run would take, and the bytes that are free on its device; or why that is not known, of one
    layout or of all.

    By the fit in the run's folder where it holds for this model; else estimated, without running the model.
    """
    config = replace(config, devices=1, compile=False)
    build = task.commands.sketch or task.build_model
    try:
        engine = open_engine(task, build(), config)
        free = free_bytes_of(engine.device)
        data, fit = task.measured_data(config.limit), load_fit(folder)
        found: dict[Layout, RunEstimate | str] = {}
        for layout in layouts:
            train = replace(config, layout=layout)
            facts = fit_facts(engine.model, train, device=engine.device, fields=data.fields)
            is_known = fit is not None and not changed_facts(fit, facts)
            found[layout] = _foresee_or_say(engine, data, train, fit if is_known else None)
    except TruebatchError as error:
        return _reason(error)
    return found, free


def _foresee_or_say(
    engine: StepEngine, data: TrainData, train: TrainConfig, fit: MemoryFit | None
) -> RunEstimate | str:
    try:
        return _foresee(engine, data, train, fit)
    except TruebatchError as error:  # one layout may be refused where the other is not
        return _reason(error)


def _reason(error: TruebatchError) -> str:
    return f"{error.wrong} ({error.seen})"


def _foresee(engine: StepEngine, data: TrainData, train: TrainConfig, fit: MemoryFit | None) -> RunEstimate:
    assert data.measured is not None
    lengths = data.measured.lengths
    config = train.plan_config(lengths)
    plan = build_plan(lengths, config, costs=limited_costs(data.measured, config), counts=data.measured.counts)
    largest = largest_micro_batches(plan, data, train.layout)
    if fit is not None:
        memory = max(fit.predict(*sizes_of(data, rows.ids).shape(train.layout)) for rows in largest)
        seconds = None if fit.samples_per_second is None else len(lengths) / fit.samples_per_second
        return RunEstimate(memory, seconds, "estimate" if fit.is_estimate else "fit")
    added = estimate_added(engine, [make_batch(data, rows.ids, train.layout)[0] for rows in largest])
    return RunEstimate(sum(constant_bytes(engine)) + max(added), None, "estimate")


def largest_micro_batches(plan: Plan, data: TrainData, layout: Layout) -> list[Rows]:
    """Those with most cells, most pairs, most samples and most cells along other axes, each once."""
    steps = range(min(plan.num_steps, MOST_STEPS))
    all_rows = [rows for step in steps for rows in plan.step(step)[0] if len(rows.ids)]
    ids = np.unique(np.concatenate([rows.ids for rows in all_rows]))
    sizes = sizes_of(data, ids)
    shapes = [sizes.take(np.searchsorted(ids, rows.ids)).shape(layout) for rows in all_rows]
    chosen = {max(range(len(shapes)), key=lambda at, part=part: shapes[at][part]) for part in range(6)}  # type: ignore[misc]
    return [all_rows[at] for at in sorted(chosen)]
