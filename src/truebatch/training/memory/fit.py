"""`fit_memory`: run a few micro-batches of the user's own samples, and learn what any other would take.

lengths -> a few shapes -> forward and backward of each, nothing left behind -> the line through the peaks
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from truebatch.batch.collate import collate
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.split import cells_of
from truebatch.errors import ConfigError, MemoryLimitError
from truebatch.planning.rows import Ints, Layout, Rows, packed_row, padded_rows
from truebatch.progress import counted, stage
from truebatch.training.checkpoint.state_dict import copy_buffers, restore_buffers
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, length_of, measure_by_reading, planned_field, read_sample
from truebatch.training.distributed.collectives import is_sharded
from truebatch.training.memory.cost_model import (
    FIT,
    MemoryFit,
    MemoryShape,
    Point,
    Sizes,
    changed_facts,
    fit_points,
    largest_cells,
    load_fit,
)
from truebatch.training.memory.fake_tensor_estimate import estimate_added
from truebatch.training.memory.measure import added_bytes, held_bytes
from truebatch.training.memory.oom import free_memory, is_out_of_memory
from truebatch.training.random_state import random_state, restore_random
from truebatch.training.step import StepEngine, accumulate

_LOG = logging.getLogger(__name__)
QUANTILES = (0.25, 0.75, 1.0)
NUMBERS, OTHER_NUMBERS = (1, 2, 8, 32), (1, 2, 4, 8)
"""Of samples that are neighbours along the planned axis, and along another."""
MIXED = (4, 8, 16)
MOST_TIMES_LONGEST = 8
"""A probe of several samples has no more cells than this many of the longest sample."""
SHARES, NEAR_SHARES = (0.25, 0.5), (0.8, 0.95)
"""Of what a given limit leaves for micro-batches: what further probes take; the second ones on a GPU, where a probe is
quick and there is nothing to swap to."""
MORE_SHARES, BENT = (0.7, 0.9), 0.03
"""Where points are as far from one line, its slope changes on the way to the limit: probes nearer to it."""
BELOW_FAILED = 0.9
"""A budget stays this far below a probe that did not fit."""
MOST_READ = 4096
"""Samples that are read for their lengths along other axes than the planned one; the longest is always among them."""
STATES = {"AdamW": 2, "Adam": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "RMSprop": 1}
"""Tensors an optimiser holds for each parameter; others are taken to hold 2."""


def fit_memory(
    engine: StepEngine,
    data: TrainData,
    config: TrainConfig,
    *,
    limit_bytes: int | None = None,
    is_estimate: bool = False,
    sizes: Sizes | None = None,
    enough_cells: int | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> MemoryFit:
    """What micro-batches of these samples take on the engine's device, in the layout and precision of `config`.

    Probes are made of the user's own samples. Parameters, buffers, gradients, optimisers and random generators are
    afterwards as they were before.

    Args:
        limit_bytes: if given, more probes go half way to this limit, on a GPU nearly all of it, so that the line need not
            reach as far.
        is_estimate: run nothing; every probe is estimated from shapes (see `estimate_added`).
        sizes: what `sizes_of` gives for the data, where somebody has it.
        enough_cells: no probe is larger: nobody will want a larger budget.
        say: told what is probed, before it is.
    """
    _refuse_sharded(engine.model)
    sizes = sizes_of(data) if sizes is None else sizes
    facts = fit_facts(engine.model, config, device=engine.device, fields=data.fields)
    constant = constant_bytes(engine)

    def fitted(points: Sequence[Point], most_cells: int | None = None) -> MemoryFit:
        fit = fit_points(points, resident_bytes=constant[0], optimiser_bytes=constant[1], facts=facts)
        return replace(fit, is_estimate=is_estimate, most_cells=most_cells)

    if is_estimate:
        with _generators_kept():
            return fitted(_estimate_all(engine, data, choose_probes(sizes), config.layout))
    with untouched(engine):
        probes = choose_probes(sizes)
        say(f"measuring memory: {len(probes)} micro-batches of {int(sizes.lengths.min()):,} cells and more")
        points, failed = _probe_all(engine, data, probes, config.layout)
        fit = fitted(points, _below(failed, sizes))
        room = 0 if limit_bytes is None else limit_bytes - fit.constant_bytes
        near = () if engine.device.type == "cpu" else (*NEAR_SHARES, *MORE_SHARES)
        for share in (*SHARES, *near) if room > 0 else ():
            if share in MORE_SHARES and fit.uncertainty <= BENT:
                continue
            limit = fit.constant_bytes + int(share * room)
            further = _further(fit, sizes, config.layout, limit, enough_cells)
            if further:
                say(f"measuring memory: {len(further)} micro-batches that take about {share:.0%} of it")
            more, failed = _probe_all(engine, data, further, config.layout, is_first=False)
            points += more
            most = [n for n in (fit.most_cells, _below(failed, sizes)) if n is not None]
            fit = fitted(points, min(most, default=None))
    return fit


def _below(failed: MemoryShape | None, sizes: Sizes) -> int | None:
    """Cells that are safely fewer than those for which memory ran out.

    Where cells along other axes may have been the reason, the longest sample is not called too long for it.
    """
    if failed is None:
        return None
    least = int(sizes.lengths.max()) if failed.others and failed.samples > 1 else 0
    return max(int(BELOW_FAILED * failed.cells), least)


def _refuse_sharded(model: nn.Module) -> None:
    if is_sharded(model):
        raise ConfigError(
            "memory is measured on one device with whole parameters",
            seen="sharded parameters",
            do="fit before `fully_shard`, or set cells by hand",
        )


def sizes_of(data: TrainData, ids: Ints | None = None) -> Sizes:
    """How long these samples are along every axis that is laid in rows; without `ids` all of them.

    Lengths along other axes than the planned one are read from the samples: of very many, some are drawn.
    """
    lengths = (data.measured or measure_by_reading(data.samples, data.fields)).lengths
    keys = list(_other_axes(data.fields).values())
    planned = Sizes(lengths, ids=np.arange(len(lengths)))
    if ids is not None:
        planned = planned.take(ids)
    if not keys:
        return planned
    chosen = planned.drawn(MOST_READ) if ids is None else planned
    assert chosen.ids is not None
    with _generators_kept():
        found = [_lengths_along(_read_transformed(data, int(i)), keys, int(i)) for i in chosen.ids]
    return replace(chosen, others=tuple(np.array(found, dtype=np.int64).T))


@contextmanager
def _generators_kept() -> Iterator[None]:
    """A transform may draw; afterwards the random generators are as before."""
    generators = random_state()
    try:
        yield
    finally:
        restore_random(generators)


def _lengths_along(sample: Any, keys: Sequence[str], sample_id: int) -> list[int]:
    return [length_of(sample, key, sample_id) for key in keys]


def _other_axes(fields: Sequence[Field]) -> dict[str, str]:
    """Axis -> a field along it, for every axis in rows beside the planned one."""
    planned = planned_field(fields)
    along = [field for field in fields if field.kind == "along" and planned is not None and field.axis != planned.axis]
    return {field.axis: field.key for field in along}


def _read_transformed(data: TrainData, sample_id: int) -> Any:
    sample = read_sample(data.samples, sample_id)
    return sample if data.transform is None else data.transform(sample, sample_id, 0)


def choose_probes(sizes: Sizes) -> list[Ints]:
    """Sample ids of every probe, the cheapest first: neighbours in length along every axis, and some as they come."""
    most = MOST_TIMES_LONGEST * int(sizes.totals.max())
    probes = []
    for lengths in (sizes.lengths, *sizes.others):
        order = np.argsort(lengths, kind="stable")
        for quantile in QUANTILES:
            for number in NUMBERS if lengths is sizes.lengths else OTHER_NUMBERS:
                places = samples_near(order, round(quantile * (len(order) - 1)), number)
                if number == 1 or _width(sizes.take(places)) <= most:
                    probes.append(places)
    drawn = np.random.default_rng(0).permutation(len(sizes))
    probes += [drawn[:number] for number in MIXED if number <= MOST_TIMES_LONGEST or len(drawn) >= number]
    probes.sort(key=lambda places: _width(sizes.take(places)))
    return [places if sizes.ids is None else sizes.ids[places] for places in probes]


def _width(sizes: Sizes) -> int:
    """Padded cells along all axes."""
    shape = sizes.shape("padded")
    return shape.cells + shape.others


def samples_near(order: Ints, place: int, number: int) -> Ints:
    """`number` samples that end at a place of the order by length; the first one again where there are too few."""
    chosen: Ints = order[np.maximum(np.arange(place - number + 1, place + 1), 0)]
    return chosen


def _further(
    fit: MemoryFit, sizes: Sizes, layout: Layout, limit_bytes: int, enough_cells: int | None = None
) -> list[Ints]:
    """As much as this limit allows: of middling samples, of the longest and of all kinds. None if that is little."""
    lengths = sizes.lengths
    cells = largest_cells(fit, sizes, layout=layout, limit_bytes=limit_bytes)
    cells = cells if enough_cells is None else min(cells, enough_cells)
    if 2 * cells <= max(point.cells for point in fit.points):
        return []
    order = np.argsort(lengths, kind="stable")
    at = [len(order) // 2, len(order) - 1]
    probes = [samples_near(order, place, max(1, cells // max(int(lengths[order[place]]), 1))) for place in at]
    drawn = np.random.default_rng(1).choice(len(lengths), max(1, cells // max(int(lengths.min()), 1)))
    width = np.cumsum(lengths[drawn]) if layout == "packed" else np.arange(1, len(drawn) + 1) * int(lengths.max())
    probes.append(drawn[: max(1, int(np.searchsorted(width, cells)))])
    return [places if sizes.ids is None else sizes.ids[places] for places in probes]


def _probe_all(
    engine: StepEngine, data: TrainData, probes: Sequence[Ints], layout: Layout, *, is_first: bool = True
) -> tuple[list[Point], MemoryShape | None]:
    """What each takes, up to the first that does not fit; and that one."""
    points: dict[MemoryShape, Point] = {}
    failed: MemoryShape | None = None
    for at, ids in enumerate(counted(probes, "measuring memory, micro-batches", len(probes))):
        batch, shape = make_batch(data, ids, layout)
        if shape in points:
            continue
        if at == 0:
            _probe(engine, batch)  # Workspaces that are made once, on first use, belong to no shape.
        num_bytes = _probe(engine, batch)
        if num_bytes is None:
            failed = shape
            break
        points[shape] = Point.of(shape, num_bytes)
    if is_first and probes and not points:
        raise MemoryLimitError(
            "not even the shortest samples can be trained on this device",
            seen=f"memory ran out for {shape.samples} sample(s) of {shape.cells + shape.others:,} cells",
            do="use a smaller model, lower precision, gradient_checkpointing or LoRA",
        )
    return list(points.values()), failed


@stage("estimating memory from shapes")
def _estimate_all(engine: StepEngine, data: TrainData, probes: Sequence[Ints], layout: Layout) -> list[Point]:
    made = {shape: batch for batch, shape in (make_batch(data, ids, layout) for ids in probes)}
    added = estimate_added(engine, list(made.values()))
    return [Point.of(shape, num_bytes) for shape, num_bytes in zip(made, added, strict=True)]


def _probe(engine: StepEngine, batch: MicroBatch) -> int | None:
    """The bytes a micro-batch adds; None if it does not fit."""
    if engine.device.type != "cpu":
        # What torch keeps of the probe before may be all of the GPU, and kernels that are loaded now get nothing of it.
        free_memory(engine.device)
    try:
        return added_bytes(lambda: run_batch(engine, batch), device=engine.device)
    except Exception as error:  # memory runs out in errors of many classes
        if not is_out_of_memory(error):
            raise
        _LOG.info("a probe of %s cells does not fit: %s: %s", cells_of(batch), type(error).__name__, error)
        said = str(error)
    free_memory(engine.device, said=said)
    return None


def run_batch(engine: StepEngine, batch: MicroBatch) -> None:
    """Forward and backward as a step does them, adding to the gradients that are there."""
    accumulate(replace(engine, guard=None, exchanges=False), [batch], engine.objective.counts(batch), epoch=0)


def make_batch(data: TrainData, ids: Ints, layout: Layout) -> tuple[MicroBatch, MemoryShape]:
    """The micro-batch of these samples, and what its memory depends on."""
    samples = [_read_transformed(data, int(i)) for i in ids]
    lengths = measure_by_reading(samples, data.fields).lengths
    keys = list(_other_axes(data.fields).values())
    found = [_lengths_along(sample, keys, int(i)) for sample, i in zip(samples, ids, strict=True)]
    others = tuple(np.array(found, dtype=np.int64).T)
    batch = collate(samples, _rows(ids, lengths, layout), data.fields)
    # As if every cell had a label: other samples may have more of them than these.
    return replace(batch, blanks={}), Sizes(lengths, others).shape(layout)


def _rows(ids: Ints, lengths: Ints, layout: Layout) -> Rows:
    if layout == "packed":
        return packed_row(ids, int(lengths.sum()))
    return padded_rows(ids, int(lengths.max()))


@contextmanager
def untouched(engine: StepEngine) -> Iterator[None]:
    """While open, every trained parameter has a gradient to add to, as in the middle of a step; then all is as before."""
    trained = [p for group in engine.groups for p in group.parameters]
    gradients = [p.grad for p in trained]
    buffers = copy_buffers(engine.model)
    generators = random_state()
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        restore_buffers(buffers)
        restore_random(generators)


def constant_bytes(engine: StepEngine) -> tuple[int, int]:
    """What is there all the time: model with gradients, and the state of the optimisers, made yet or not."""
    trained = [p for group in engine.groups for p in group.parameters]
    resident = held_bytes([*engine.model.parameters(), *engine.model.buffers()]) + held_bytes(trained)
    return resident, sum(_optimiser_bytes(group.optimiser) for group in engine.groups)


def _optimiser_bytes(optimiser: torch.optim.Optimizer) -> int:
    total = 0
    for part in optimiser.param_groups:
        for parameter in part["params"]:
            state = [v for v in optimiser.state.get(parameter, {}).values() if isinstance(v, torch.Tensor)]
            total += held_bytes(state) if state else _tensors_each(optimiser, part) * held_bytes([parameter])
    return total


def _tensors_each(optimiser: torch.optim.Optimizer, part: dict[str, Any]) -> int:
    name = type(optimiser).__name__
    if name == "SGD":
        return int(bool(part["momentum"]))
    return STATES.get(name, 2) + int(bool(part.get("amsgrad"))) + int(name == "RMSprop" and bool(part["momentum"]))


def fit_facts(
    model: nn.Module, config: TrainConfig, *, device: torch.device, fields: Sequence[Field] = ()
) -> dict[str, Any]:
    """What a fit holds for. A fit made with other facts says nothing about this model."""
    axes = sorted(_other_axes(fields))
    named = list(model.named_parameters())
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in named]
    return {
        "parameters": sum(p.numel() for _, p in named),
        "trained": sum(p.numel() for _, p in named if p.requires_grad),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for _, p in named}),
        "shapes": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
        "precision": config.precision,
        "layout": config.layout,
        "gradient_checkpointing": config.gradient_checkpointing,
        "device": device.type,
        **({"other_axes": axes} if axes else {}),
    }


def stale_fit_warnings(
    folder: Path, model: nn.Module, config: TrainConfig, *, device: torch.device, fields: Sequence[Field] = ()
) -> list[str]:
    """What to say at the start of a run that has a budget and a fit of something else; nothing if the fit holds."""
    fit = load_fit(folder) if config.cells is not None else None
    if fit is None:
        return []
    changed = changed_facts(fit, fit_facts(model, config, device=device, fields=fields))
    if not changed:
        return []
    return [f"the memory fit in {folder / FIT} no longer holds ({'; '.join(changed)}): run `truebatch fit` again"]
