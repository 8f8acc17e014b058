"""`oom: quarantine`: a sample that does not fit alone is left out of its step, on all ranks, and written down.

What remains is divided by its own counts, so the gradient is that of a step which never had the sample. The ranks
agree on it after every try: one small sum a step, which only this policy pays for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.split import leave_out, take_samples
from truebatch.errors import ConfigError, MemoryLimitError
from truebatch.io.atomic_files import corrupt_file_errors, to_json
from truebatch.io.text_encoding import read_text
from truebatch.objective import add_counts
from truebatch.training.distributed.collectives import (
    all_gather_list,
    all_reduce_max,
    broadcast_from_rank0,
    rank,
    sum_numbers,
)
from truebatch.training.memory.oom_retry import Guard, SampleTooLarge, read_budget

T = TypeVar("T")
QUARANTINE = "quarantine.jsonl"
_MOST_BYTES = 1 << 28
MANY = 8
"""So many samples in a row, with none between them that fits, are not too large by chance: something else takes the memory."""
Counts = Mapping[str, int]


def run_without_quarantined(
    guard: Guard,
    batches: Sequence[MicroBatch],
    counts: Counts,
    *,
    run: Callable[[Sequence[MicroBatch], Counts], T],
    count: Callable[[MicroBatch], Counts],
    device: torch.device,
) -> tuple[T, dict[str, int]]:
    """What `run` gives for the samples that fit, and the counts it was divided by, the same on every rank.

    Runs again from nothing whenever some rank found another sample that does not fit: the counts have changed. Where many are
    left out in a row and none fits between them, samples are not the reason, and none is left out.
    """
    found: list[tuple[int, str]] = []
    while True:
        kept, without = _leave_out(guard, batches, counts, count, device)
        is_empty = bool(guard.quarantined) and not _are_any(kept, device)
        if is_empty:
            _blame_none_of_many(guard, batches, found, device)
        result, mine = _try(run, kept, without)
        new = all_gather_list([] if mine is None else [mine]) if _any_rank(mine is not None, device) else []
        if not new:
            assert result is not None
            if is_empty:
                guard.doubted += found
                guard.steps_without += 1
            else:
                _note(guard, [*guard.doubted, *found])
                guard.doubted, guard.left_in_row = [], 0
            return result[0], without
        found += new
        guard.quarantined |= dict(new)


def _are_any(kept: Sequence[MicroBatch], device: torch.device) -> bool:
    return _any_rank(any(batch.num_samples for batch in kept), device)


def _blame_none_of_many(
    guard: Guard, batches: Sequence[MicroBatch], found: Sequence[tuple[int, str]], device: torch.device
) -> None:
    """No sample of the step fits. A few in a row may be too large; many are not a matter of theirs."""
    (here,) = sum_numbers([sum(batch.num_samples for batch in batches)], device)
    guard.left_in_row += here
    if guard.left_in_row >= MANY:
        raise _not_one(guard, [*guard.doubted, *found])


@contextmanager
def uncounted(guard: Guard | None) -> Iterator[None]:
    """Around a look at a step that is not the step itself: its samples are not counted twice."""
    if guard is None:
        yield
        return
    before = guard.left_in_row, guard.steps_without
    yield
    guard.left_in_row, guard.steps_without = before


def refuse_nothing_done(guard: Guard | None, *, steps: int) -> None:
    """At the end of a run of so many steps: one in which no sample fitted has trained nothing, however few they were."""
    if guard is not None and 0 < steps <= guard.steps_without:
        raise _not_one(guard, guard.doubted)


def _not_one(guard: Guard, doubted: Sequence[tuple[int, str]]) -> MemoryLimitError:
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


def _leave_out(
    guard: Guard,
    batches: Sequence[MicroBatch],
    counts: Counts,
    count: Callable[[MicroBatch], Counts],
    device: torch.device,
) -> tuple[list[MicroBatch], dict[str, int]]:
    ids = frozenset(guard.quarantined)
    if not ids:  # the same on every rank: what one finds, all are told
        return list(batches), dict(counts)
    kept = [part for batch in batches for part in leave_out(batch, guard.fields, ids=ids)]
    out = [part for batch in batches for part in _those(guard, batch, ids)]
    removed = add_counts(count(part) for part in out)
    names = sorted(counts)
    totals = sum_numbers([removed.get(n, 0) for n in names], device)
    return kept, {name: counts[name] - total for name, total in zip(names, totals, strict=True)}


def _those(guard: Guard, batch: MicroBatch, ids: frozenset[int]) -> list[MicroBatch]:
    return take_samples(batch, guard.fields, [at for at, i in enumerate(batch.sample_ids) if i in ids])


def _try(
    run: Callable[[Sequence[MicroBatch], Counts], T], kept: Sequence[MicroBatch], counts: Counts
) -> tuple[tuple[T] | None, tuple[int, str] | None]:
    try:
        return (run(kept, counts),), None
    except SampleTooLarge as error:
        return None, (error.sample_id, f"{error.wrong}: {error.seen}")


def _any_rank(mine: bool, device: torch.device) -> bool:
    return all_reduce_max(int(mine), device) > 0


def _note(guard: Guard, found: Sequence[tuple[int, str]]) -> None:
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


def open_guard(guard: Guard, folder: Path | None, *, is_sharded: bool) -> None:
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


def quarantine_record(guard: Guard | None) -> dict[str, int]:
    """For the log: how many samples are left out, where any is."""
    return {"quarantined": len(guard.quarantined)} if guard is not None and guard.quarantined else {}


def _read_quarantine(guard: Guard) -> None:
    lines = _lines(guard.folder / QUARANTINE) if guard.folder is not None else []
    guard.quarantined |= dict(broadcast_from_rank0(lines))
    if guard.quarantined:
        guard.say(f"{len(guard.quarantined)} samples do not fit into memory and are left out")


def _lines(path: Path) -> list[tuple[int, str]]:
    if not path.exists():
        return []
    lines = read_text(path, max_bytes=_MOST_BYTES).splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    with corrupt_file_errors(path, do="delete the line: the sample is then found again"):
        return [(int(entry["id"]), str(entry["reason"])) for entry in map(json.loads, whole)]
