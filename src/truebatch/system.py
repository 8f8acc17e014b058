"""A system is one value: everything `plan`, `fit`, `verify`, `train` and `evaluate` need to know about a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from truebatch.objective import Objective
from truebatch.planning.measuring import Measured
from truebatch.tensors.field import Field

Sample = Mapping[str, Any]
Dataset = Sequence[Sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A task from file to loss. Each part is a plain function of the configuration."""

    name: str
    config_type: type
    """A dataclass; the other parts receive an instance of it."""
    load: Callable[[Any], Dataset]
    """The samples, addressed by sample id."""
    fields: Callable[[Any], Sequence[Field]]
    """How a micro-batch holds a sample."""
    measure: Callable[[Any, Dataset], Measured]
    """Length, further costs and counts of every sample, without building a tensor."""
    build_model: Callable[[Any], nn.Module]
    objective: Callable[[Any], Objective]
    evaluate: Callable[[Any, nn.Module, Dataset], Mapping[str, float]] | None = None
    """Figures of a trained model on a dataset; None if the loss is all there is."""
