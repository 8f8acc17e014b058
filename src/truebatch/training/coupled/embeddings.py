"""What `embed` gave for some samples: read and checked, joined over micro-batches, in the order of sample ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch.objective import CoupledObjective, Embeddings
from truebatch.planning.rows import Ints

ONLY = ""
"""The name of a tensor that was returned without one."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleEntries:
    """The entries of some samples, end to end."""

    values: Tensor
    """[n, ...]"""
    sizes: tuple[int, ...] | None = None
    """How many entries each sample has, where it gave a tensor of its own; None: one each."""

    def places(self, samples: Ints) -> Ints:
        """The places of the entries of these samples, in this order."""
        if self.sizes is None:
            return samples
        starts = [0, *accumulate(self.sizes)]
        return np.concatenate([np.arange(starts[at], starts[at + 1]) for at in samples] or [samples]).astype(np.int64)

    def take(self, samples: Ints) -> SampleEntries:
        """Of these samples, in this order."""
        places = torch.from_numpy(self.places(samples)).to(self.values.device)
        sizes = None if self.sizes is None else tuple(self.sizes[at] for at in samples)
        return SampleEntries(self.values.index_select(0, places), sizes)

    def given(self, values: Tensor) -> Tensor | list[Tensor]:
        """These values in the form the samples gave theirs in."""
        return values if self.sizes is None else list(torch.split(values, list(self.sizes)))


@dataclass(frozen=True, slots=True, eq=False)
class StepEmbeddings:
    """Everything that `embed` gave for some samples."""

    ids: tuple[int, ...]
    entries: Mapping[str, SampleEntries]
    totals: Mapping[str, Tensor]
    """What is added up over the step."""

    def in_order(self) -> StepEmbeddings:
        """The same by sample id, so that neither cut nor rank shows."""
        order = np.argsort(np.asarray(self.ids, dtype=np.int64), kind="stable")
        entries = {name: one.take(order) for name, one in self.entries.items()}
        return replace(self, ids=tuple(self.ids[at] for at in order), entries=entries)


def read_embeddings(found: Embeddings, batch: MicroBatch, objective: CoupledObjective) -> StepEmbeddings:
    """What `embed` gave for a micro-batch; `ConfigError` unless every sample has its share."""
    if isinstance(found, Tensor):
        found = {ONLY: found}
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            "`embed` of a coupled objective gave nothing that its loss could be made of",
            seen=f"a {type(found).__name__}",
            do="return a tensor with a row for each sample, or several of them by name",
        )
    totals = {name: _total(name, found) for name in objective.added}
    entries = {name: _entries(name, value, batch) for name, value in found.items() if name not in totals}
    return StepEmbeddings(batch.sample_ids, entries, totals)


def _total(name: str, found: Mapping[str, Any]) -> Tensor:
    value = found.get(name)
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"`embed` gave no tensor {name!r}, which the objective says is added up over the step",
            seen=f"names {sorted(found)}",
            do="return it from `embed`, or leave its name out of `added`",
        )
    return value


def _entries(name: str, value: Any, batch: MicroBatch) -> SampleEntries:
    entries: SampleEntries | None
    number, what = batch.num_samples, repr(name) if name else "embeddings"
    if isinstance(value, Tensor):
        found = value.shape[0] if value.ndim else 0
        entries = SampleEntries(value)
    elif isinstance(value, Sequence) and all(isinstance(one, Tensor) and one.ndim for one in value):
        found = len(value)
        entries = SampleEntries(torch.cat(list(value)), tuple(len(one) for one in value)) if value else None
    else:
        raise ConfigError(
            f"`embed` gave {what} in a form that is not known",
            seen=f"a {type(value).__name__}",
            do="return a tensor with a row for each sample, or a list with a tensor for each",
        )
    if found != number or entries is None:
        raise ConfigError(
            f"`embed` did not give {what} for each sample",
            seen=f"{found} for the {number} samples {list(batch.sample_ids[:8])}",
            do="return one row, or one tensor of a list, for each sample in the order of batch.sample_ids; what is a sum over "
            "the micro-batch belongs into `added`",
        )
    return entries


def join(parts: Sequence[StepEmbeddings]) -> StepEmbeddings | None:
    """The samples of all micro-batches; None without any."""
    if not parts:
        return None
    entries = {name: _joined([part.entries[name] for part in parts]) for name in parts[0].entries}
    # In double precision: another order of micro-batches is then another rounding only after 16 digits.
    totals = {name: torch.stack([part.totals[name].double() for part in parts]).sum(0) for name in parts[0].totals}
    return StepEmbeddings(tuple(i for part in parts for i in part.ids), entries, totals)


def _joined(parts: Sequence[SampleEntries]) -> SampleEntries:
    sizes = None if parts[0].sizes is None else tuple(n for part in parts for n in part.sizes or ())
    return SampleEntries(torch.cat([part.values for part in parts]), sizes)
