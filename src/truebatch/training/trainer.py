"""`train`: plan -> load -> step -> finite? -> update -> log -> validate -> checkpoint; a second start resumes it.

`train_step` is one step, and `training/step.py` its gradient and its update; `finish_step` is what follows.

>>> import torch
>>> from truebatch import Field, TrainConfig, TrainData, train
>>> class Squares:
...     def counts(self, batch):
...         return {"loss": batch.num_samples}
...     def sums(self, model, batch):
...         return {"loss": model(batch["x"]).square().sum()}
>>> data = TrainData(samples=[{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}], fields=[Field(name="x", kind="once")])
>>> train(torch.nn.Linear(2, 1), Squares(), data, TrainConfig(epochs=3)).step
3
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import nn

from truebatch.attention.api import cache_device_capability
from truebatch.batch.keyed_random import name_purposes
from truebatch.batch.segments import most_segments
from truebatch.batch.torch_compile import compile_layers, force_eager
from truebatch.data.loader import LoadedStep, LoaderConfig
from truebatch.errors import MemoryLimitError, RestartError, TruebatchError, exit_code_of
from truebatch.objective import Objective
from truebatch.planning.lengths.measured_values import Measured
from truebatch.progress import stage
from truebatch.training.after_step import finish_step
from truebatch.training.callbacks import Callback, Logger
from truebatch.training.checkpoint.save_resume import resume_run
from truebatch.training.checks.batch_coupling import refuse_couplings, refused_if_seen
from truebatch.training.checks.compare_one_by_one import compare_with_one_by_one
from truebatch.training.checks.first_step import check_first_step
from truebatch.training.choices.run_choices import keep_choices, settle_open
from truebatch.training.config import TrainConfig
from truebatch.training.context import EpochPlans, Job, Plans, TrainResult
from truebatch.training.data import (
    ContentHash,
    TrainData,
    content_of,
    measure_by_reading,
    single_sample_batch_fn,
)
from truebatch.training.distributed.collectives import (
    is_peer_failure,
    is_sharded,
    num_ranks,
    rank,
)
from truebatch.training.distributed.device import DeviceContext, find_device, move_model
from truebatch.training.exactness.atom_run import keep_atoms, open_atoms, refuse_coupled_bits
from truebatch.training.exactness.first_step import check_first_atoms
from truebatch.training.exactness.kernels import deterministic_kernels, no_deterministic_kernel
from truebatch.training.logging.metrics_jsonl import MetricsLog, find_gaps, open_metrics
from truebatch.training.logging.step_record import skipped_step_record, step_record
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.training.memory.oom_retry import OomGuard, load_steps_with_oom_retry
from truebatch.training.memory.quarantine import open_guard
from truebatch.training.optim.nonfinite import handle_nonfinite, is_bad
from truebatch.training.optim.param_groups import Group, check_terms, default_group, make_groups
from truebatch.training.random_state import seed_random
from truebatch.training.run_dir.resume_checks import check_data, opened_run
from truebatch.training.run_dir.run_dir import RunFolder, RunState, write_status
from truebatch.training.run_dir.signals import EXIT_INTERRUPTED, catch_signals
from truebatch.training.run_dir.watchdog import Watchdog, watch_progress
from truebatch.training.step import (
    StepEngine,
    StepOutcome,
    apply_update,
    check_has_gradient,
    step_counts,
    take_gradients,
)
from truebatch.training.stream import SampleStream, WindowPlans, open_data
from truebatch.training.train_state import EndReason, TrainState
from truebatch.training.validation import ValidationSet


def train(
    model: nn.Module,
    objective: Objective,
    data: TrainData,
    config: TrainConfig | None = None,
    *,
    groups: Sequence[Group] | None = None,
    out: str | Path | RunFolder | None = None,
    say: Callable[[str], None] | None = None,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
    device_context: DeviceContext | None = None,
) -> TrainResult:
    """Train a model; with `out`, as a run that can be killed at any moment and resumes when it is started again.

    Args:
        config: by default the run chooses precision, budget and workers itself (`TrainConfig.auto()`), and says why.
        groups: parameters with optimisers of their own; by default AdamW over all trainable parameters.
        out: the run's folder, or an open run. The same settings resume it; others are refused, naming what differs.
        say: gets one line now and then; by default nothing is printed.
        loggers: get every record, on rank 0.
        callbacks: called at every step on every rank, may stop the run, and have a state that is saved with it.
        device_context: the device to run on, if it has been found already.
    """
    config, say = config or TrainConfig.auto(), say or (lambda _line: None)
    couplings = refuse_couplings(model.train(), config.allow, taken=getattr(objective, "couplings", ()))
    refuse_coupled_bits(objective, config)
    config, choices = settle_open(model, objective, data, config, groups=groups, out=out, say=say)
    device_context = device_context or find_device(config)
    _prepare_model(model, device_context, config)
    data, stream = open_data(data, config)
    known = data if stream is None else replace(data, samples=stream.window(0).samples)
    content = ContentHash(known) if out is not None and rank() == 0 else None
    measured = known.measured or measure_by_reading(known.samples, data.fields, content=content)
    plans, num_steps = _plans(config, measured, stream)
    guard = OomGuard(fields=data.fields, when_too_large=config.oom, say=say)
    engine = StepEngine(
        model=model, objective=objective, groups=make_groups(groups or [default_group(model, config)], model),
        device=device_context.device, autocast=device_context.autocast, scaler=device_context.scaler, seed=config.seed,
        stand_in=lambda: single_sample_batch_fn(data, epoch=0)(0 if stream is None else stream.at_hand.start.first_id),
        guard=guard,
        callbacks=(*callbacks, *((stream,) if stream is not None else ())),
        changes_buffers=bool(config.allow), atoms=open_atoms(model, config, width=plans.config.cells, say=say),
    )  # fmt: skip
    with _kernels(engine), opened_run(out, config) as run, catch_signals() as stop, _watchdog(config) as watchdog:
        if run is not None and rank() == 0:
            check_data(run, measured, content=content_of(known, read=content, say=say), say=say)
            keep_choices(run.folder, choices)
            keep_atoms(run, plans, config, engine.device, say=say)
        open_guard(guard, None if run is None else run.folder, is_sharded=is_sharded(model))
        job = Job(
            engine=engine, data=data, plans=plans, config=config, num_steps=num_steps, couplings=couplings, run=run,
            stop=stop, say=say, validation=_validation_set(data, config, plans, device_context),
            loggers=loggers if rank() == 0 else (), watchdog=watchdog,
        )  # fmt: skip
        return _run(job)


def _plans(
    config: TrainConfig, measured: Measured, stream: SampleStream | None
) -> tuple[EpochPlans | WindowPlans, int]:
    """The plans of all epochs, or of the windows of a stream, and how many steps the run has."""
    planned = config.plan_config(measured.lengths)
    plans = EpochPlans(measured, planned) if stream is None else WindowPlans(stream, planned)
    most_steps = config.epochs * plans.of(0).num_steps if stream is None else sys.maxsize
    return plans, min(config.max_steps or most_steps, most_steps)


def _kernels(engine: StepEngine) -> AbstractContextManager[None]:
    """Where bits count, only kernels that repeat themselves."""
    return nullcontext() if engine.atoms is None else deterministic_kernels(engine.device)


def _prepare_model(model: nn.Module, device_context: DeviceContext, config: TrainConfig) -> None:
    move_model(model, device_context, config)
    if config.compile:
        cache_device_capability(device_context.device)
        compile_layers(model)
    name_purposes(model)


def _validation_set(
    data: TrainData, config: TrainConfig, plans: Plans, device_context: DeviceContext
) -> ValidationSet | None:  # fmt: skip
    if data.validation is None:
        return None
    loader = LoaderConfig(workers=config.workers, pin_memory=device_context.device.type == "cuda")
    planned = plans.config if plans.config.atoms else config.plan_config()
    return ValidationSet(samples=data.validation, fields=data.fields, plan_config=planned, loader=loader)


def _watchdog(config: TrainConfig) -> AbstractContextManager[Watchdog | None]:
    """A run that no longer moves is reported with the stacks of all its threads, and exits with 75."""
    if config.stuck_seconds is None:
        return nullcontext()
    return watch_progress(config.stuck_seconds, who=f"rank {rank()}")


def _run(job: Job) -> TrainResult:
    state = _resume_or_start(job)
    log = _open_log(job, state)
    for logger in job.loggers:
        logger.begin(state.step, job.num_steps)
    try:
        _write_status(job, "running", state)
        while not state.is_done:
            _train_epoch(job, state, log)
        for callback in job.engine.callbacks:
            callback.ended(state.step)
    except BaseException as caught:
        error = _explained(caught)
        code = exit_code_of(error)
        run_state: RunState = "interrupted" if code == EXIT_INTERRUPTED else "failed"
        _write_status(job, run_state, state, exit_code=code, message=f"{type(error).__name__}: {error}")
        if error is caught:
            raise
        raise error from caught
    finally:
        if log is not None:
            log.close()
    assert state.end is not None
    code = state.end.exit_code
    ends: dict[int, RunState] = {0: "done", 1: "failed", EXIT_INTERRUPTED: "interrupted"}
    _write_status(job, ends[code], state, exit_code=code)
    return TrainResult(state.step, job.records, state.best_loss, state.why, state.end)


def _explained(error: BaseException) -> BaseException:
    """An error of a library in words: another process of the run is gone, or memory ran out outside the training step. Any
    other error unchanged."""
    if isinstance(error, TruebatchError):
        return error
    if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
        return MemoryLimitError(
            "out of memory outside the training step; a smaller micro-batch would not help",
            seen=(str(error) or type(error).__name__).strip().splitlines()[0][:200],
            do="see what else takes memory on this device; the same command resumes from the last checkpoint",
        )
    if not is_peer_failure(error):
        return no_deterministic_kernel(error) or error
    return RestartError(
        "another process of this run is gone",
        seen=f"rank {rank()} of {num_ranks()} waited for it: {str(error).strip().splitlines()[0][:160]}",
        do="look at what the other ranks have said; the same command resumes from the last checkpoint",
    )


def _resume_or_start(job: Job) -> TrainState:
    job.say(job.config.describe_step())
    job.say(f"{job.num_steps:,} steps, {job.config.precision} on {job.engine.device}")
    if widths := job.plans.config.row_widths:
        fill = job.plans.of(0).statistics.fill
        job.say(
            f"compiled rows: {len(widths)} width(s), {widths[0]:,} to {widths[-1]:,} cells, {fill:.1%} of them tokens"
        )
    if job.plans.config.atoms:
        said = job.plans.of(0).statistics
        job.say(
            f"exactness: bits; atoms of {job.plans.config.cells:,} cells, about {said.micro_batches / said.steps:.1f} per "
            f"step, {said.fill:.1%} of their cells tokens"
        )
    if allowed := ", ".join(sorted({c.name for c in job.couplings})):
        job.say(f"equality: in distribution ({allowed} allowed by name)")
    found = resume_run(job.run.checkpoints, job.engine) if job.run is not None else None
    if found is None:
        # Else every process would draw its own, and a run that begins again would not be the one that was killed.
        seed_random(job.config.seed, rank=rank())
        return TrainState(num_steps=job.num_steps)
    state, rejected = found
    for why in rejected:
        job.say(f"skipped a corrupt checkpoint: {why}")
    job.say(f"resuming after step {state.step}")
    failed_at_end = state.end is EndReason.CHECK_FAILED and state.step >= state.num_steps > 0
    _take_num_steps(job, state)
    if state.step >= job.num_steps:
        if state.end is not EndReason.CHECK_FAILED:
            state.finish(EndReason.ALL_STEPS_DONE, "all steps were done before")
    elif failed_at_end or state.end not in (EndReason.CHECK_FAILED, EndReason.NO_IMPROVEMENT):
        state.reopen()
    return state


def _take_num_steps(job: Job, state: TrainState) -> None:
    """Schedules know the number of steps: more of them change the learning rates of those to come."""
    is_moving = any(group.schedule.shape != "constant" for group in job.engine.groups)
    if state.num_steps not in (0, job.num_steps) and is_moving:
        job.say(
            f"the run had {state.num_steps:,} steps and now has {job.num_steps:,}: the steps to come get the "
            "learning rates of the longer or shorter run, those done had others"
        )
    state.num_steps = job.num_steps


def _open_log(job: Job, state: TrainState) -> MetricsLog | None:
    if job.run is None or rank() != 0:
        return None
    log = open_metrics(job.run.metrics, step=state.step or None)
    for line in log.damage:
        job.say(f"warning: {line}")
    if gaps := find_gaps(job.run.metrics, step=state.step):
        job.say(
            f"warning: {gaps}; the weights do not depend on it, the log stays incomplete: bring it back from a copy"
        )
    return log


def _write_status(
    job: Job, run_state: RunState, state: TrainState, *, exit_code: int | None = None, message: str = ""
) -> None:
    if job.run is not None and rank() == 0:
        message = message or state.why
        write_status(
            job.run, run_state, step=state.step, num_steps=_known_steps(job), exit_code=exit_code, message=message,
            reason=state.end,
        )  # fmt: skip


def _known_steps(job: Job) -> int | None:
    """How many steps the run has; None for a stream that is read to its end."""
    return job.num_steps if job.num_steps < sys.maxsize else None


def _train_epoch(job: Job, state: TrainState, log: MetricsLog | None) -> None:
    """The steps of an epoch from where the run is; fewer if the run ends or is rolled back."""
    plan = job.plans.of(state.epoch)
    steps = load_steps_with_oom_retry(
        plan, job.samples, job.data.fields, device=job.engine.device, start_step=state.step_in_epoch,
        transform=job.data.transform, config=_loader_config(job),
    )  # fmt: skip
    try:
        for loaded in steps:
            is_rolled_back = train_step(job, state, loaded, log)
            if is_rolled_back:
                return
            state.advance(loaded.number, steps_per_epoch=plan.num_steps)
            finish_step(job, state, log)
            if state.is_done:
                return
    finally:
        steps.close()


def _loader_config(job: Job) -> LoaderConfig:
    """Compiled layers get rows of a few widths and tables of one size; everything else is made to measure."""
    pins = job.engine.device.type == "cuda"
    widths = job.plans.config.widths if job.config.compile else ()
    slots = most_segments(job.plans.measured.lengths, widths[0]) if widths else None
    return LoaderConfig(workers=job.config.workers, pin_memory=pins, slots=slots, first_id=job.first_id)


def train_step(job: Job, state: TrainState, loaded: LoadedStep, log: MetricsLog | None) -> bool:
    """One step: counts, gradients, update and a line in the log; True if the run was rolled back to an earlier step."""
    began = time.perf_counter()
    if job.watchdog is not None:
        job.watchdog.beat(f"step {state.step}")
    if state.step in state.skipped_steps:
        _skip_step(job, state, loaded, log)
        return False
    engine, batches = job.engine, loaded.batches
    for callback in engine.callbacks:
        callback.before_step(state.step)
    counts = step_counts(batches, engine.objective, loaded.counts, device=engine.device)
    check_terms(engine.groups, list(counts), is_first=state.step == 0)
    if job.config.true_batch == "compare" and state.step < job.config.compare_steps:
        _compare_with_one_by_one(job, state, loaded, counts)
    if engine.atoms is None:
        check_first_step(job, state, loaded)
    else:
        check_first_atoms(job, state, loaded, counts)
    rates = {g.name: g.set_rate(state.step, job.num_steps) for g in engine.groups}
    outcome = _take_gradients(job, state, loaded, counts)
    is_updated = False
    if is_bad(engine, outcome):
        if handle_nonfinite(job, state, loaded, outcome, log):
            return True
    else:
        is_updated = apply_update(engine, outcome)
        state.nonfinite_in_row = 0
    if engine.guard is not None and engine.guard.left_in_row:  # no sample of this step fits
        _skip_step(job, state, loaded, log)
        return False
    state.step += 1
    record = step_record(job, state, loaded, outcome, rates=rates, is_updated=is_updated, began=began)
    job.records.append(record)
    job.log_record(log, record)
    return False


def _compare_with_one_by_one(job: Job, state: TrainState, loaded: LoadedStep, counts: Mapping[str, int]) -> None:
    with force_eager():  # every sample alone has a shape of its own
        difference = compare_with_one_by_one(
            job.engine, loaded.batches, counts, single_sample_batch_fn(job.data, epoch=state.epoch),
            epoch=state.epoch, precision=job.config.precision,
        )  # fmt: skip
    how = "are not finite, and not compared" if difference is None else f"differ from one by one by {difference:.1e}"
    job.say(f"step {state.step}: true batches {how}")


def _take_gradients(job: Job, state: TrainState, loaded: LoadedStep, counts: Mapping[str, int]) -> StepOutcome:
    """The gradient of a step; the first one of a process is also watched for what only running shows."""
    if job.records:
        return take_gradients(job.engine, loaded.batches, counts, epoch=state.epoch)
    what = "compiling the layers, in the first step" if job.config.compile else "the first step"
    with stage(what), refused_if_seen(job.engine.model, job.config.allow, job.couplings):
        outcome = take_gradients(job.engine, loaded.batches, counts, epoch=state.epoch)
    check_has_gradient(job.engine, outcome)
    return outcome


def _skip_step(job: Job, state: TrainState, loaded: LoadedStep, log: MetricsLog | None) -> None:
    """A step that made the run roll back, or has no sample that fits: no loss, but a line in the log with its samples."""
    state.step += 1
    job.log_record(log, skipped_step_record(state, loaded))
