"""Rows of the benchmark of vlm_pruning, and what they say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch.data.loader import LoadedStep

ONE, FITTED, EVEN = "one by one", "fitted budget", "even batches (the limit)"
LOADED = ", with loading"
TWICE, ALONE = "fitted budget, two whole forwards", "fitted budget, no teacher"
NOTE_ONE, NOTE_BATCH = "one by one, the note's way", "the note's batch, the note's way"


@dataclass(kw_only=True, slots=True)
class Row:
    """One way to run the same step."""

    way: str
    samples_per_second: float
    tokens_per_second: float
    """Tokens that are real."""
    peak_gib: float
    fill: float
    micro_batches: int
    rounds: list[float]


def make_row(way: str, steps: Sequence[LoadedStep], seconds: float, peak: float, took: list[float]) -> Row:
    """A row from what ran and the seconds a sample took."""
    batches = [batch for step in steps for batch in step.batches]
    tokens = sum(sum(batch.rows().lengths) for batch in batches)
    cells = sum(batch.rows().segments.num_cells for batch in batches)
    number = sum(batch.num_samples for batch in batches)
    return Row(
        way=way, samples_per_second=1 / seconds, tokens_per_second=tokens / number / seconds, peak_gib=peak,
        fill=tokens / cells, micro_batches=len(batches), rounds=took,
    )  # fmt: skip


def ratios(rows: Sequence[Mapping[str, Any]], *, is_card: bool = False) -> dict[str, float]:
    """What the rows say, first things first; tokens that are real are compared, so that lengths do not matter.

    Rows with loading are compared with rows without on a GPU only: on a CPU they are timed by the clock, and
    everything else in CPU seconds.
    """
    rate = {row["way"]: row["tokens_per_second"] for row in rows}
    batch = next((way for way in rate if way.startswith("batch ") and not way.endswith(LOADED)), "")
    pairs = {
        "fitted budget / even batches": (FITTED, EVEN),
        "fitted budget / one by one": (FITTED, ONE),
        f"{batch} / one by one": (batch, ONE),
        "with loading, fitted / even batches": (FITTED + LOADED, EVEN + LOADED),
        "with loading, fitted / one by one": (FITTED + LOADED, ONE + LOADED),
        f"with loading, {batch} / one by one": (batch + LOADED, ONE + LOADED),
        "one forward shared / two whole forwards": (FITTED, TWICE),
        "no teacher / two whole forwards": (ALONE, TWICE),
        "the note's way, its batch / one by one": (NOTE_BATCH, NOTE_ONE),
        "fitted budget / the note's batch in the note's way": (FITTED, NOTE_BATCH),
    }
    if is_card:
        pairs["fitted budget, with loading / without"] = (FITTED + LOADED, FITTED)
        pairs["with loading, fitted / the note's batch in the note's way"] = (FITTED + LOADED, NOTE_BATCH)
    found = {name: rate[a] / rate[b] for name, (a, b) in pairs.items() if a in rate and b in rate}
    memory = {row["way"]: row["peak_gib"] for row in rows}
    if batch and memory.get(ONE):
        found[f"memory, {batch} / one by one"] = memory[batch] / memory[ONE]
    return found
