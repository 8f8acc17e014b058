"""What is left to do: batches without results, and those in which a worker died, cut until the cause has a name.

a death -> the same batch once more -> another -> halves, the same for each -> one sample that died twice alone: a record
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from truebatch.scoring.batch_plan import Batches, halves
from truebatch.scoring.store.journal import CrashedBatch, JournalState
from truebatch.scoring.store.outcome import Outcome, failed

DEATHS = 2
"""How often a batch is tried whole."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch to judge."""

    number: int
    """Of the batch in the plan."""
    keys: tuple[str, ...]
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class PendingWork:
    """All that is left of a run."""

    work: tuple[Work, ...]
    crashed: tuple[Outcome, ...]
    """Samples that ended the interpreter whenever they were judged alone."""


def find_left(
    batches: Batches, journals: JournalState, *, asked: Collection[str], retry: Collection[str] = (),
    shard: tuple[int, int] = (0, 1),
) -> PendingWork:  # fmt: skip
    """Batches of this shard without a result, suspects first; failures of a kind in `retry` are run again.

    Only keys in `asked` count: a sample that failed may be gone from the data by now.
    """
    deaths = _deaths(journals.suspects)
    work: list[Work] = []
    crashed: list[Outcome] = []
    for number, batch in enumerate(batches.batches):
        if number % shard[1] != shard[0]:
            continue
        for keys, died in _cut(batch, deaths):
            open_keys = tuple(key for key in keys if key in asked and not _is_done(key, journals, retry))
            if open_keys and died >= DEATHS:
                crashed.append(_crash(open_keys[0], died))
            elif open_keys:
                work.append(Work(number, open_keys, died + 1))
    work.sort(key=lambda one: one.attempt == 1)  # stable: suspects first, then as planned
    return PendingWork(tuple(work), tuple(crashed))


def _deaths(suspects: Sequence[CrashedBatch]) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    for suspect in suspects:
        found[suspect.keys] = max(found.get(suspect.keys, 0), suspect.attempt)
    return found


def _cut(keys: Sequence[str], deaths: dict[tuple[str, ...], int]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The batch, or the parts it must be cut into, each with the number of its deaths."""
    died = deaths.get(tuple(keys), 0)
    if died < DEATHS or len(keys) == 1:
        yield tuple(keys), died
        return
    for part in halves(keys):
        yield from _cut(part, deaths)


def _is_done(key: str, journals: JournalState, retry: Collection[str]) -> bool:
    state = journals.results.state(key)
    return state is not None and not (state[0] == "failed" and state[2] in retry)


def _crash(key: str, died: int) -> Outcome:
    message = f"the process that judged it alone ended {died} times without an answer"
    return failed(key, stage="model", kind="crashed", message=message, attempts=died)
