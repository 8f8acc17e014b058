"""A system is one value: everything `plan`, `fit`, `verify`, `train` and `evaluate` need to know about a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from truebatch.batch.fields import Field
from truebatch.data.fetch import Transform
from truebatch.generation.config import Generation
from truebatch.objective import Objective
from truebatch.planning.lengths.measure import Measured
from truebatch.planning.rows import Layout

Sample = Mapping[str, Any]
Dataset = Sequence[Sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A task from file to loss. Each part is a plain function of the configuration.

    >>> from dataclasses import dataclass
    >>> from truebatch import Field, System, measure
    >>> @dataclass(frozen=True)
    ... class Settings:
    ...     number: int = 3
    >>> system = System(
    ...     name="numbers",
    ...     config_type=Settings,
    ...     load=lambda config: [{"x": [1.0] * (i + 1)} for i in range(config.number)],
    ...     fields=lambda config: [Field(name="x")],
    ...     measure=lambda config, samples: measure(samples, field="x"),
    ...     build_model=lambda config: ...,
    ...     objective=lambda config: ...,
    ... )
    >>> system.measure(Settings(), system.load(Settings())).lengths.tolist()
    [1, 2, 3]
    """

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
    restore_model: Callable[[Any, Mapping[str, Any]], nn.Module] | None = None
    """The model that trained weights (by name) belong to, without reading the data; by default that of `build_model`."""
    train_type: type | None = None
    """A subclass of `TrainConfig` with the defaults of this task; by default `TrainConfig` itself."""
    validation: Callable[[Any], Dataset | None] | None = None
    """Samples that are never trained on."""
    test: Callable[[Any], Dataset | None] | None = None
    """Samples that no choice was made on, for `evaluate`; by default those of `validation`."""
    evaluate: Callable[[Any, nn.Module, Dataset, Path], Mapping[str, Any]] | None = None
    """Figures of a trained model on a dataset; predictions and pictures go to the folder. None: the loss is all."""
    show: Callable[[Any, nn.Module, Dataset, Path], Sequence[Path]] | None = None
    """Pictures of what a trained model does on a dataset, kept in the folder of its run; the files that were written."""
    generate: Callable[[Any, nn.Module, Sequence[str], Generation], Iterator[tuple[int, str]]] | None = None
    """Text for prompts: the number of the prompt and what is new of its text, as it comes."""
    transform: Callable[[Any], Transform] | None = None
    """Augmentation keyed by sample id and epoch."""
    groups: Callable[[Any, nn.Module], Sequence[Any]] | None = None
    """Optimisers of their own (`training.optim.param_groups.Group`); by default AdamW over all trainable parameters."""
    sketch: Callable[[Any], nn.Module] | None = None
    """A model of the same shapes, for estimates of memory where `build_model` first works for a while; default: that."""
    choose_layout: Callable[[Any, nn.Module], tuple[Layout, str]] | None = None
    """The layout where none is asked for, and why in one line; by default padded."""
    settle: Callable[[Any], Any] | None = None
    """Fill in settings that were left open and follow from the data; a settled configuration stays as it is."""
    attend: Callable[[Any, nn.Module, Objective, Path], Sequence[Any]] | None = None
    """Who stands beside a run in this folder (`training.callbacks.Attendant`): schedules, detectors that may stop it."""
    describe: Callable[[Any], Sequence[str]] | None = None
    """Lines for the start of a run: what was read, and what was done to it."""
    save: Callable[[Any, nn.Module, Path], None] | None = None
    """Write the trained model into an empty folder, for use without truebatch."""
