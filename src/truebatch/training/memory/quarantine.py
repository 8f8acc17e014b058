"""`oom: quarantine`: a sample that does not fit alone is left out of its step, on all ranks, and written down.

What remains is divided by its own counts, so the gradient is that of a step which never had the sample. The ranks
agree on it after every try: one small sum per step, which only this policy pays for. `training/step.py` has the loop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.split import leave_out, take_samples
from truebatch.errors import ConfigError, MemoryLimitError
from truebatch.io.atomic_files import corrupt_file_errors, to_json
from truebatch.io.text_encoding import read_text
from truebatch.objective import Objective, add_counts
from truebatch.training.distributed.collectives import (
    all_gather_list,
    all_reduce_max,
    broadcast_from_rank0,
    rank,
    sum_numbers,
)
from truebatch.training.memory.oom_retry import OomGuard, read_budget

QUARANTINE = "quarantine.jsonl"
_MOST_BYTES = 1 << 28
MANY = 8
"""So many samples in a row, with none between them that fits, are not too large by chance: something else takes the memory."""
Counts = Mapping[str, int]
TooLarge = tuple[int, str]
"""The id of a sample that does not fit alone, and why."""


def leave_out_quarantined(
    guard: OomGuard, batches: Sequence[MicroBatch], counts: Counts, objective: Objective, *, device: torch.device
) -> tuple[list[MicroBatch], dict[str, int]]:
    """The micro-batches without the samples that are left out, and the counts of what remains, the same on every rank."""
    ids = frozenset(guard.quarantined)
    if not ids:  # the same on every rank: what one finds, all are told
        return list(batches), dict(counts)
    kept = [part for batch in batches for part in leave_out(batch, guard.fields, ids=ids)]
    out = [part for batch in batches for part in _those(guard, batch, ids)]
    removed = add_counts(objective.counts(part) for part in out)
    names = sorted(counts)
    totals = sum_numbers([removed.get(n, 0) for n in names], device)
    return kept, {name: counts[name] - total for name, total in zip(names, totals, strict=True)}


def _those(guard: OomGuard, batch: MicroBatch, ids: frozenset[int]) -> list[MicroBatch]:
    return take_samples(batch, guard.fields, [at for at, i in enumerate(batch.sample_ids) if i in ids])


def is_step_empty(
    guard: OomGuard,
    batches: Sequence[MicroBatch],
    kept: Sequence[MicroBatch],
    found: Sequence[TooLarge],
    *,
    device: torch.device,
) -> bool:
    """True if no sample of the step is left on any rank.

    A few in a row may be too large. Many in a row are not the reason, and `MemoryLimitError` says so.
    """
    if not guard.quarantined or _any_rank(any(batch.num_samples for batch in kept), device):
        return False
    (here,) = sum_numbers([sum(batch.num_samples for batch in batches)], device)
    guard.left_in_row += here
    if guard.left_in_row >= MANY:
        raise _not_one(guard, [*guard.doubted, *found])
    return True


def agree_on_quarantine(guard: OomGuard, mine: TooLarge | None, *, device: torch.device) -> list[TooLarge]:
    """Leave out what any rank has found too large in this try, on all ranks; empty if no rank has found any."""
    if not _any_rank(mine is not None, device):
        return []
    new = all_gather_list([] if mine is None else [mine])
    guard.quarantined |= dict(new)
    return new


def note_quarantined(guard: OomGuard, found: Sequence[TooLarge], *, is_empty: bool) -> None:
    """The step is done without these samples: they are written down as soon as one that fits was met beside them."""
    if is_empty:
        guard.doubted += found
        guard.steps_without += 1
        return
    _write_down(guard, [*guard.doubted, *found])
    guard.doubted, guard.left_in_row = [], 0


@contextmanager
def uncounted(guard: OomGuard | None) -> Iterator[None]:
    """Around a look at a step that is not the step itself: its samples are not counted twice."""
    if guard is None:
        yield
        return
    before = guard.left_in_row, guard.steps_without
    yield
    guard.left_in_row, guard.steps_without = before


def refuse_nothing_done(guard: OomGuard | None, *, steps: int) -> None:
    """At the end of a run of so many steps: one in which no sample fitted has trained nothing, however few they were."""
    if guard is not None and 0 < steps <= guard.steps_without:
        raise _not_one(guard, guard.doubted)


def _not_one(guard: OomGuard, doubted: Sequence[TooLarge]) -> MemoryLimitError:
    """Samples that were left out since the last one that fitted are in again."""
    reason = doubted[0][1] if doubted else next(iter(guard.quarantined.values()), "")
    for sample_id, _ in doubted:
        guard.quarantined.pop(sample_id, None)
    known = (
        f"; those that {QUARANTINE} in the run's folder names stay out until it is deleted" if guard.quarantined else ""
    )
    return MemoryLimitError(
        "not one sample fits into memory, even alone",
        seen=f"{guard.left_in_row} samples in a row; {reason}",
        do="see what else takes memory on this device, use a smaller model or lower precision, or set gradient_checkpointing, "
        "and start again; no sample was left out for it" + known,
    )


def _any_rank(mine: bool, device: torch.device) -> bool:
    return all_reduce_max(int(mine), device) > 0


def _write_down(guard: OomGuard, found: Sequence[TooLarge]) -> None:
    """Say it on every rank; rank 0, which owns the run's folder, writes it down for the next start."""
    for sample_id, reason in found:
        guard.say(f"sample {sample_id} is left out from here on: {reason}")
    if not found or guard.folder is None or rank() != 0:
        return
    with (guard.folder / QUARANTINE).open("a", encoding="ascii") as file:
        for sample_id, reason in found:
            file.write(to_json({"id": sample_id, "reason": reason}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def open_guard(guard: OomGuard, folder: Path | None, *, is_sharded: bool) -> None:
    """Tie a guard to a run's folder (None: no run) and let it begin with what earlier starts have learnt."""
    guard.folder = folder
    if guard.when_too_large == "quarantine" and is_sharded:
        raise ConfigError(
            "samples cannot be left out where parameters are sharded",
            seen="oom='quarantine' and a model under fully_shard: every forward pass needs all ranks",
            do="use oom='raise'; a lowered budget is then saved and the run goes on when it is started again",
        )
    if is_sharded:
        read_budget(guard)
    if guard.when_too_large == "quarantine":
        _read_quarantine(guard)


def quarantine_record(guard: OomGuard | None) -> dict[str, int]:
    """For the log: how many samples are left out, where any is."""
    return {"quarantined": len(guard.quarantined)} if guard is not None and guard.quarantined else {}


def _read_quarantine(guard: OomGuard) -> None:
    lines = _lines(guard.folder / QUARANTINE) if guard.folder is not None else []
    guard.quarantined |= dict(broadcast_from_rank0(lines))
    if guard.quarantined:
        guard.say(f"{len(guard.quarantined)} samples do not fit into memory and are left out")


def _lines(path: Path) -> list[TooLarge]:
    if not path.exists():
        return []
    lines = read_text(path, max_bytes=_MOST_BYTES).splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    with corrupt_file_errors(path, do="delete the line: the sample is then found again"):
        return [(int(entry["id"]), str(entry["reason"])) for entry in map(json.loads, whole)]
