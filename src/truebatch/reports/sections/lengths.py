"""Lengths of a run's samples, and the padding that each grouping would waste.

runs/<name>/plan/lengths.npy: the lengths, or an even subset of them, written when a run begins
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import DataError, TruebatchError
from truebatch.io.text_encoding import open_file
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.reports.page import Section
from truebatch.reports.plan_tables import COMPARED_SAMPLES, compared_settings, plan_and_count, plans_table
from truebatch.reports.plots import bars, histogram
from truebatch.reports.tables import Table
from truebatch.training.run_dir.resume_checks import LENGTHS

PLANNED = 10_000
"""Samples that are planned for the comparison of groupings: more would not change the shares."""


def length_sections(run: Path, settings: Mapping[str, Any]) -> Iterator[Section]:
    """A histogram of the run's lengths, and the groupings side by side under its own limits."""
    path = run / "plan" / LENGTHS
    if not path.is_file():
        return
    lengths = _read(path)
    if not len(lengths):
        return
    picture = partial(histogram, lengths.tolist(), title="Lengths", x="tokens")
    yield Section(title="Lengths of the samples", tables=[lengths_table(lengths)], drawn=[picture])
    yield _padding(lengths, settings)


def lengths_table(lengths: NDArray[np.int64]) -> Table:
    """Histogram of sample lengths."""
    shares = np.quantile(lengths, [0.05, 0.5, 0.95])
    header = ("samples", "shortest", "5 %", "median", "mean", "95 %", "longest")
    five, half, most = (f"{share:,.0f}" for share in shares)
    row = (f"{len(lengths):,}", f"{lengths.min():,}", five, half, f"{lengths.mean():,.1f}", most, f"{lengths.max():,}")
    return Table(header, (row,))


def _read(path: Path) -> NDArray[np.int64]:
    try:
        with open_file(path) as file:
            found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged", seen=str(error), do="remove the file; the report does not need it"
        ) from error
    return np.asarray(found, dtype=np.int64).reshape(-1)


def _padding(lengths: NDArray[np.int64], settings: Mapping[str, Any]) -> Section:
    """The shares of padding, by plans over these lengths with the limits of the run."""
    given = settings.get("train", settings)
    batch = int(given.get("batch_size") or COMPARED_SAMPLES)
    longest = int(lengths.max())
    cells = max(longest, int(given.get("cells") or batch * longest))
    step = int(given.get("samples_per_step") or batch)
    words = [
        f"planned for this table: steps of {step:,} samples; a micro-batch has at most {cells:,} cells, where it is of a "
        f"fixed number or a bucket {batch:,} samples"
    ]
    measured = Measured(lengths=lengths[:PLANNED])
    try:
        rows = [
            plan_and_count(measured, PlanConfig(**one), epoch=0, ranks=1)[1]
            for one in compared_settings({"cells": cells, "samples_per_step": step}, samples=batch)
        ]
    except TruebatchError as error:
        return Section(title="Padding by grouping", words=[f"{error.wrong} ({error.seen})"])
    waste = {str(row["grouping"]): 100 * row["waste"] for row in rows}
    picture = partial(bars, waste, title="Cells that hold padding", y="%")
    return Section(title="Padding by grouping", words=words, tables=[plans_table(rows)], drawn=[picture])
