"""What is logged of every step: one record, for `metrics.jsonl` and for the loggers."""

from __future__ import annotations

import time
from collections.abc import Mapping

from truebatch.data.loader import LoadedStep
from truebatch.training.checks.first_step import equality_record
from truebatch.training.context import Job, Record
from truebatch.training.distributed.collectives import all_gather_list, sum_numbers
from truebatch.training.exactness.atom_run import digest_record
from truebatch.training.memory.quarantine import quarantine_record
from truebatch.training.step import StepOutcome
from truebatch.training.train_state import TrainState


def step_record(
    job: Job,
    state: TrainState,
    loaded: LoadedStep,
    outcome: StepOutcome,
    *,
    rates: Mapping[str, float],
    is_updated: bool,
    began: float,
) -> Record:
    """Loss, gradient norms, learning rates, tokens and time of a step that began at `began`, over all ranks."""
    seconds = time.perf_counter() - began
    tokens, cells = _tokens_and_cells(job, loaded)
    return {
        "step": state.step,
        "epoch": state.epoch,
        "loss": sum(outcome.loss.values()),
        **{f"loss/{name}": value for name, value in outcome.loss.items()},
        **{f"grad_norm/{name}": value for name, value in outcome.grad_norm.items()},
        **{f"learning_rate/{name}": value for name, value in rates.items()},
        "updated": is_updated,
        "tokens": tokens,
        "fill": tokens / max(cells, 1),
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        **equality_record(job),
        **digest_record(job, state),
        **quarantine_record(job.engine.guard),
    }


def skipped_step_record(state: TrainState, loaded: LoadedStep) -> Record:
    """A step that updated nothing: its samples, over all ranks."""
    samples = sorted(all_gather_list([i for batch in loaded.batches for i in batch.sample_ids]))
    return {"step": state.step, "epoch": state.epoch, "passed_over": True, "updated": False, "samples": samples}


def _tokens_and_cells(job: Job, loaded: LoadedStep) -> tuple[int, int]:
    left_out = {} if job.engine.guard is None else job.engine.guard.quarantined
    found = [(b.sample_ids, b.rows()) for b in loaded.batches if "cells" in b.axes]
    lengths = [n for ids, rows in found for i, n in zip(ids, rows.lengths, strict=True) if i not in left_out]
    numbers = [sum(lengths), sum(rows.shape[0] * rows.shape[1] for _, rows in found)]
    tokens, cells = sum_numbers(numbers, job.engine.device)
    return tokens, cells
