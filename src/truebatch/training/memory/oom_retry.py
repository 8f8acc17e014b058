"""Out of memory survived: the whole step of this rank runs again, cut smaller, with the result it would have had.

cut -> run (training/step.py) -> out of memory? -> leave the error, clear gradients -> free memory, generators back,
budget lowered -> cut again

Nothing here talks to other ranks where parameters are whole: their gradients are summed once, after the last
micro-batch, so a rank that splits keeps nobody waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from truebatch.batch.collate import collate
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.split import cells_of, split_microbatch
from truebatch.data.fetch import Dataset, Transform
from truebatch.data.loader import LoadedStep, LoaderConfig, load_steps
from truebatch.errors import MemoryLimitError, RestartError
from truebatch.io.atomic_files import corrupt_file_errors, read_json, write_json
from truebatch.planning.plan import Plan
from truebatch.planning.rows import padded_rows
from truebatch.testing.failpoints import failpoint
from truebatch.training.checkpoint.state_dict import copy_buffers, restore_buffers
from truebatch.training.config import WhenTooLarge
from truebatch.training.distributed.collectives import all_reduce_max, broadcast_from_rank0, rank
from truebatch.training.memory.oom import first_line, free_memory, is_out_of_memory
from truebatch.training.random_state import random_state, restore_random

if TYPE_CHECKING:
    from truebatch.training.step import StepEngine

FIRST_PATIENCE, MOST_PATIENCE = 32, 1024
"""Steps without trouble before the budget grows; doubled each time memory runs out again."""
BUDGET = "budget.json"


class SampleTooLarge(MemoryLimitError):  # noqa: N818 - said as a fact about the sample; the policy may go on without it
    """A sample for which memory does not suffice even alone."""

    sample_id: int = -1


@dataclass(kw_only=True, slots=True, eq=False)
class OomGuard:
    """What a rank has learnt about its memory; changed between tries and between steps."""

    fields: Sequence[Field]
    """How a micro-batch is put together, and so how it is taken apart."""
    when_too_large: WhenTooLarge = "raise"
    """What to do with a sample that does not fit alone."""
    folder: Path | None = None
    """The run's folder: a lowered budget that the next start needs is written there."""
    say: Callable[[str], None] = lambda _line: None
    cells: int | None = None
    """The budget: most cells of one micro-batch of several samples; None as planned."""
    ceiling: int = 0
    """Cells of the largest micro-batch that ran out of memory: a budget that has grown back to it is lifted."""
    patience: int = FIRST_PATIENCE
    clean_steps: int = 0
    recoveries: int = 0
    """How often a step was run again."""
    quarantined: dict[int, str] = field(default_factory=dict)
    """Samples that are left out, with the reason."""
    doubted: list[tuple[int, str]] = field(default_factory=list)
    """Those of them that no sample which fits was met after; they are written down when one is."""
    left_in_row: int = 0
    """Samples of the last steps, none of which had one that fits."""
    steps_without: int = 0
    """Steps of this start that had no sample which fits."""

    def cut(self, batches: Collection[MicroBatch], *, most: int | None = None) -> list[MicroBatch]:
        """The micro-batches as they may be run now: those over the budget are split, no sample is moved."""
        cells = self.cells if most is None else most
        if cells is None:
            return list(batches)
        return [
            part
            for batch in batches
            for part in split_microbatch(batch, self.fields, fits=lambda one: cells_of(one) <= cells)
        ]

    def lower(self, batch: MicroBatch) -> None:
        """Half of what did not fit from now on."""
        size = cells_of(batch)
        self.ceiling = max(self.ceiling, size)
        self.cells = max(1, min(size // 2, self.cells or size))

    def note_step(self, *, is_clean: bool) -> None:
        """A step is done. After enough clean ones the budget doubles, until it is what was planned."""
        if not is_clean:
            self.patience, self.clean_steps = min(2 * self.patience, MOST_PATIENCE), 0
        elif self.cells is not None:
            self.clean_steps += 1
            if self.clean_steps > self.patience:
                grown, self.clean_steps = 2 * self.cells, 0
                self.cells = grown if grown < self.ceiling else None


class OomRetry:
    """The tries of one step: how each is cut, and what is learnt from one that ran out of memory.

    Args:
        is_sharded: every forward is a collective, so no rank may split alone: the lowered budget is saved instead.
        is_step: False in validation: it says nothing about steps, and no policy leaves its samples out.
    """

    def __init__(
        self,
        guard: OomGuard,
        batches: Sequence[MicroBatch],
        *,
        device: torch.device,
        is_sharded: bool = False,
        is_step: bool = True,
    ) -> None:
        self.guard, self.batches, self.device = guard, batches, device
        self.is_sharded, self.is_step = is_sharded, is_step
        self.generators = random_state()
        self.num_tries, self.most_tries = 0, most_tries(batches)
        self.failed_alone: set[int] = set()

    def next_cut(self) -> list[MicroBatch]:
        """The micro-batches of the next try, as small as the budget asks; in the last one every sample is alone."""
        self.num_tries += 1
        parts = self.guard.cut(self.batches, most=0 if self._is_last and not self.is_sharded else None)
        if self.is_sharded and self.guard.cells is not None:
            missing = all_reduce_max(len(parts), self.device) - len(parts)
            parts += [collate([], padded_rows(np.zeros(0, dtype=np.int64), 0), self.guard.fields)] * missing
        return parts

    def note_success(self) -> None:
        """All micro-batches of this try have run. Budgets of sharded parameters, the same on every rank, do not grow."""
        if self.is_step and not self.is_sharded:
            self.guard.note_step(is_clean=self.num_tries == 1)

    def lower_budget(self, batch: MicroBatch, said: str) -> None:
        """Memory ran out in `batch`: free it, set the generators back and halve the budget for the next try.

        Call it outside the `except` block, when gradients are cleared.

        Raises:
            SampleTooLarge: a sample did not fit alone, twice or in the last try.
            RestartError: parameters are sharded; started again, the run resumes with the lowered budget.
        """
        guard = self.guard
        free_memory(self.device, said=said)
        restore_random(self.generators)
        guard.recoveries += 1
        if self.is_sharded:
            _save_and_restart(guard, batch, said)
        if batch.num_samples > 1:
            guard.lower(batch)
            guard.say(f"{_what(batch, said)}; the step runs again with at most {guard.cells:,} cells a micro-batch")
            return
        alone = batch.sample_ids[0] if batch.sample_ids else -1
        if self._is_last or alone in self.failed_alone:
            raise _too_large(alone, cells_of(batch), said, is_step=self.is_step)
        self.failed_alone.add(alone)
        guard.say(f"{_what(batch, said)}; the step runs again with memory freed")

    @property
    def _is_last(self) -> bool:
        return self.num_tries >= self.most_tries


def run_with_oom_retry(
    engine: StepEngine,
    batches: Sequence[MicroBatch],
    *,
    begin: Callable[[], None],
    run: Callable[[MicroBatch], None],
    is_step: bool = True,
) -> None:
    """Run every micro-batch after `begin`.

    With a guard, memory that runs out only changes the cut: gradients are cleared and all of it begins again, at most
    ceil(log2 samples) + 1 times. `is_step` is False for a pass that the step itself follows.
    """
    sharded = engine.is_sharded
    retry = engine.guard and OomRetry(engine.guard, batches, device=engine.device, is_sharded=sharded)
    buffers = copy_buffers(engine.model) if retry and engine.changes_buffers else []
    while True:
        parts, at = retry.next_cut() if retry else batches, 0
        begin()
        try:
            for at, batch in enumerate(parts):  # noqa: B007  # where memory runs out
                if batch.num_samples or sharded:
                    run(batch)
            if retry and is_step:
                retry.note_success()
            return
        except Exception as error:  # memory runs out in errors of many classes
            if not (retry and is_out_of_memory(error)):
                raise
            said = first_line(error)  # Only text leaves this block: the traceback holds the tensors of the try.
        for group in engine.groups:
            group.optimiser.zero_grad(set_to_none=True)
        restore_buffers(buffers)
        retry.lower_budget(parts[at], said)


def most_tries(batches: Collection[MicroBatch]) -> int:
    """Halving comes down to single samples in ceil(log2(samples)) tries after the first; one sample gets a second."""
    samples = sum(batch.num_samples for batch in batches)
    return max(2, math.ceil(math.log2(max(samples, 1))) + 1)


def _what(batch: MicroBatch, said: str) -> str:
    return f"a micro-batch of {batch.num_samples:,} samples and {cells_of(batch):,} cells ran out of memory ({said})"


def _too_large(sample_id: int, cells: int, said: str, *, is_step: bool) -> SampleTooLarge:
    error = SampleTooLarge(
        f"{'sample' if is_step else 'validation sample'} {sample_id} does not fit into memory, even alone",
        seen=f"{cells:,} cells; {said}",
        do="shorten this sample or leave it out, or set gradient_checkpointing"
        + ("; oom='quarantine' goes on without it" if is_step else ""),
    )
    error.sample_id = sample_id
    return error


def _save_and_restart(guard: OomGuard, batch: MicroBatch, said: str) -> None:
    guard.lower(batch)
    if guard.folder is not None:
        write_json(guard.folder / BUDGET, {"cells": guard.cells})
    saved = f"start the run again: it goes on with at most {guard.cells:,} cells a micro-batch"
    unsaved = f"give `out`, so that the lowered budget can be kept, or plan with cells={guard.cells}"
    raise RestartError(
        "memory ran out, and with sharded parameters a rank cannot split its micro-batches alone",
        seen=_what(batch, said),
        do=unsaved if guard.folder is None else saved,
    )


def read_budget(guard: OomGuard) -> None:
    """Begin with the budget that an earlier start of this run has left."""
    path = None if guard.folder is None else guard.folder / BUDGET
    found = None
    if path is not None and path.exists():
        with corrupt_file_errors(path, do="delete the file: the budget is then found again"):
            found = int(read_json(path, max_bytes=1 << 16)["cells"])
    guard.cells = broadcast_from_rank0(found)  # with sharded parameters all ranks must make as many micro-batches
    if guard.cells is not None:
        guard.ceiling = 2 * guard.cells
        guard.say(f"an earlier start ran out of memory: at most {guard.cells:,} cells a micro-batch")


def load_steps_with_oom_retry(
    plan: Plan,
    samples: Dataset,
    fields: Sequence[Field],
    *,
    device: torch.device,
    start_step: int = 0,
    transform: Transform | None = None,
    config: LoaderConfig | None = None,
) -> Generator[LoadedStep, None, None]:
    """This rank's steps of a plan. One that cannot be loaded because memory ran out is loaded once more, with memory freed."""
    failed_at = -1
    while True:
        steps = load_steps(
            plan, samples, fields, rank=rank(), start_step=start_step, transform=transform, config=config
        )
        try:
            for loaded in steps:
                failpoint("step.loading")
                yield loaded
                start_step = loaded.number + 1
            return
        except Exception as error:  # memory runs out in errors of many classes
            if not is_out_of_memory(error) or failed_at == start_step:
                raise
            failed_at, said = start_step, str(error)
        finally:
            steps.close()
        free_memory(device, said=said)
