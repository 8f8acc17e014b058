"""The first lines of a report: equality, speed, memory, restarts and what was left out, each as the run itself wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from truebatch.reports.page import Section
from truebatch.scoring.store.export import Status
from truebatch.training.memory.quarantine import QUARANTINE
from truebatch.training.run_dir.run_dir import STATUS, read_status

_WARM = 8
"""Steps from which on the first half can be left out as warming up."""
_TOLD_SECONDS = 1.0
"""A rate measured over less says nothing."""


class Columns(Protocol):
    """The log of a run, column by column."""

    def numbers(self, key: str) -> list[float]:
        """All values of one column that are numbers."""
        ...


def headline_section(run: Path, log: Columns) -> Iterator[Section]:
    """A section of a few sentences; none for a folder in which no training has begun."""
    status = read_status(run) if (run / STATUS).is_file() else {}
    lines = [*_state(status), *_equality(status.get("equality")), *_training(log), *_ends(run, status)]
    if lines:
        yield Section(title="In short", words=lines, is_lead=True)


def scoring_headline(status: Status) -> Section:
    """Where a scoring run stands, and how fast it was."""
    lines = [
        f"{status.ok:,} of {status.samples:,} samples scored, {status.failed:,} failed, {status.pending:,} to come"
    ]
    if status.seconds >= _TOLD_SECONDS:
        lines.append(f"{(status.ok + status.failed) / status.seconds:,.1f} samples per second while judging")
    return Section(title="In short", words=lines, is_lead=True)


def _state(status: Mapping[str, Any]) -> Iterator[str]:
    """How far it is, and why it is no further."""
    state, step, number = status.get("state"), status.get("step"), status.get("num_steps")
    if state == "new" or not isinstance(step, int):
        return
    why = f": {status['message']}" if status.get("message") else ""
    of = f"{step:,} of {number:,}" if isinstance(number, int) else f"{step:,}"
    if state == "done":
        yield f"all {step:,} steps are done" if step == number else f"done after {of} steps{why}"
    elif state == "running":
        yield f"running, {of} steps so far"
    else:
        yield f"stopped after {of} steps{why}" if state == "interrupted" else f"failed after {of} steps{why}"


def _equality(found: object) -> Iterator[str]:
    """What the check of the first step came to, in the words of the run's own line."""
    if not isinstance(found, Mapping):
        return
    verdict, samples, why = found.get("verdict"), found.get("samples"), str(found.get("why", ""))
    loss, gradient = found.get("loss"), found.get("gradient")
    if verdict == "equal" and isinstance(loss, float) and isinstance(gradient, float):
        yield f"equal to one sample at a time: {samples} samples compared, loss {loss:.0e}, gradient {gradient:.0e} apart"
    elif verdict == "bits":
        yield f"the same bits however a step is cut: {samples} samples compared"
    elif verdict == "in_distribution":
        yield f"equal to one sample at a time in distribution only: {why}"
    elif verdict == "broken":
        yield f"not equal to one sample at a time: {why}"
    elif verdict == "not_checked":
        yield f"equality was not checked: {why}"


def _training(log: Columns) -> Iterator[str]:
    """Loss, speed, fill and memory; speed by the second half of the run, when nothing is warming up."""
    losses, held = log.numbers("loss"), log.numbers("validation_loss")
    if losses:
        best = f", best validation loss {min(held):.4f}" if held else ""
        ends = f"{losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last"
        yield f"loss {ends if len(losses) > 1 else f'{losses[0]:.4f} at the only step'}{best}"
    tokens, seconds = log.numbers("tokens"), log.numbers("seconds")
    half = len(tokens) // 2 if len(tokens) >= _WARM else 0
    if tokens and len(tokens) == len(seconds) and sum(seconds[half:]) > 0:
        speed = f"{sum(tokens[half:]) / sum(seconds[half:]):,.0f} tokens per second"
        yield f"{speed} in the second half of the run" if half else f"{speed}, start included"
    fill = log.numbers("fill")
    if fill:
        yield f"{_mean(fill):.1%} of the cells held tokens, the rest padding"
    memory = log.numbers("memory_gib")
    if memory:
        yield f"{max(memory):.1f} GiB of memory at most"


def _ends(run: Path, status: Mapping[str, Any]) -> Iterator[str]:
    starts = status.get("starts")
    if isinstance(starts, int) and starts > 1:
        yield f"restarted {starts - 1} time(s)"
    if (run / QUARANTINE).is_file():
        with (run / QUARANTINE).open("rb") as file:
            left_out = sum(1 for _line in file)
        yield f"{left_out:,} sample(s) left out, because they did not fit in memory"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
