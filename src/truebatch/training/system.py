"""A system: the name of a task, its settings, and one function from settings to data, model and loss.

settings -> prepare -> Task (data, model, loss) -> plan, fit, verify, train, evaluate
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from dataclasses import Field as FieldOf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from torch import Tensor, nn

from truebatch.data.fetch import Dataset
from truebatch.errors import ConfigError
from truebatch.generation.config import Generation
from truebatch.objective import Objective
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.rows import Layout
from truebatch.training.callbacks import Callback
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, first_samples, measure_by_reading
from truebatch.training.optim.param_groups import Group
from truebatch.training.stream import is_stream

ConfigT = TypeVar("ConfigT")


class SizedDataset(Dataset, Sized, Protocol):
    """Samples addressed by sample id, and how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskCommands:
    """What only commands ask of a task. None of it changes what is trained."""

    describe: Callable[[], Sequence[str]] | None = None
    """Lines for the start of a run: what was read, and what was done to it."""
    choose_layout: Callable[[nn.Module], tuple[Layout, str]] | None = None
    """The layout where none is asked for, and why in one line; by default padded."""
    other_layout: Callable[[nn.Module], Layout | None] | None = None
    """Another layout that was proven right too and may be faster than the one chosen: a long run times both."""
    can_compile: bool = False
    """The model's layers attend by `truebatch.attention.api.attend` and draw noise by sample, so that they may be compiled."""
    sketch: Callable[[], nn.Module] | None = None
    """A model of the same shapes, for estimates of memory where `build_model` first works for a while; default: that."""
    evaluate: Callable[[nn.Module, SizedDataset, Path], Mapping[str, Any]] | None = None
    """Figures of a trained model on a dataset; predictions and pictures go to the folder. None: the loss is all."""
    show: Callable[[nn.Module, SizedDataset, Path], Sequence[Path]] | None = None
    """Pictures of what a trained model does on a dataset, kept in the folder of its run; the files that were written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """Data, model and loss of one configuration: what `System.prepare` gives and all parts of a run share.

    >>> import torch
    >>> from truebatch import Field, Task, TrainData
    >>> class Squares:
    ...     def counts(self, batch):
    ...         return {"loss": batch.num_samples}
    ...     def sums(self, model, batch):
    ...         return {"loss": model(batch["x"]).square().sum()}
    >>> task = Task(
    ...     data=TrainData(samples=[{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}], fields=[Field(name="x", kind="once")]),
    ...     build_model=lambda: torch.nn.Linear(2, 1),
    ...     objective=Squares(),
    ... )
    >>> task.measured_data(limit=1).measured.lengths.tolist()
    [1]
    """

    data: TrainData
    """Samples, fields, validation and transform."""
    build_model: Callable[[], nn.Module]
    objective: Objective
    measure: Callable[[SizedDataset], Measured] | None = None
    """Lengths, further costs and counts of the first samples, without building a tensor; by default samples are read."""
    test: Callable[[], SizedDataset | None] | None = None
    """Reads samples that no choice was made on, for `evaluate`; by default those of validation."""
    groups: Callable[[nn.Module], Sequence[Group]] | None = None
    """Optimisers of their own; by default AdamW over all trainable parameters."""
    callbacks: Callable[[nn.Module, Path], Sequence[Callback]] | None = None
    """Schedules and detectors of a run in this folder, which follow its steps and may stop it."""
    save: Callable[[nn.Module, Path], None] | None = None
    """Write the trained model into an empty folder, for use without truebatch."""
    commands: TaskCommands = field(default_factory=TaskCommands)

    def measured_data(self, limit: int | None = None) -> TrainData:
        """The samples with their lengths, `limit` of them at most; a stream unchanged. No weights are loaded."""
        if is_stream(self.data.samples):
            return self.data
        data = first_samples(self.data, limit)
        if self.measure is not None:
            # Without a length it is refused when it is measured.
            return replace(data, measured=self.measure(cast("SizedDataset", data.samples)))
        return replace(data, measured=data.measured or measure_by_reading(data.samples, data.fields))


@dataclass(frozen=True, kw_only=True, slots=True)
class System(Generic[ConfigT]):
    """A task from file to loss, for every configuration of its type.

    >>> import torch
    >>> from dataclasses import dataclass
    >>> from truebatch import Field, System, Task, TrainData
    >>> @dataclass(frozen=True)
    ... class Settings:
    ...     number: int = 3
    >>> class Squares:
    ...     def counts(self, batch):
    ...         return {"loss": batch.num_samples}
    ...     def sums(self, model, batch):
    ...         return {"loss": model(batch["x"]).square().sum()}
    >>> def prepare(config: Settings) -> Task:
    ...     samples = [{"x": [1.0] * (i + 1)} for i in range(config.number)]
    ...     data = TrainData(samples=samples, fields=[Field(name="x")])
    ...     return Task(data=data, build_model=lambda: torch.nn.Identity(), objective=Squares())
    >>> system = System(name="numbers", config_type=Settings, prepare=prepare)
    >>> system.prepare(Settings()).measured_data().measured.lengths.tolist()
    [1, 2, 3]
    """

    name: str
    config_type: type[ConfigT]
    """A dataclass. Its field `train` holds the settings of training (a `TrainConfig`); without one it is added."""
    prepare: Callable[[ConfigT], Task]
    """Reads the data, once, and says what is trained on it. No weights are loaded."""
    settle: Callable[[ConfigT], ConfigT] | None = None
    """Fill in settings that were left open and follow from the data; a settled configuration is returned unchanged."""
    restore_model: Callable[[ConfigT, Mapping[str, Tensor]], nn.Module] | None = None
    """The model that trained weights (by name) belong to, without reading the data; by default that of the task."""
    generate: Callable[[ConfigT, nn.Module, Sequence[str], Generation], Iterator[tuple[int, str]]] | None = None
    """Text for prompts, without reading the data: the number of the prompt and what is new of its text, as it comes."""

    if not TYPE_CHECKING:

        def __new__(cls, *args, **parts):
            """Show the new form to a system that is written in the former one, a function for each part."""
            former = sorted(_FORMER & set(parts))
            if former:
                raise ConfigError(
                    "a System has one function `prepare` instead of a function for each part",
                    seen=f"System({', '.join(f'{name}=...' for name in former)})",
                    do="return the parts from one function, prepare(config) -> truebatch.Task(data=truebatch.TrainData("
                    "samples=..., fields=...), build_model=..., objective=...); docs/migration.md shows each part",
                )
            return object.__new__(cls)


_FORMER = frozenset(
    {
        "load", "fields", "measure", "build_model", "objective", "train_type", "validation", "test", "evaluate", "show",
        "transform", "groups", "sketch", "choose_layout", "attend", "describe", "save",
    }
)  # fmt: skip
"""Parts that a `Task` holds now."""


def settings_type(system: System[ConfigT]) -> type[ConfigT]:
    """The system's settings with those of training under `train`, as one dataclass: one YAML file holds both."""
    kind: type[Any] = system.config_type
    own = next((f for f in fields(kind) if f.name == "train"), None) if is_dataclass(kind) else None
    if not is_dataclass(kind) or (own is not None and not _holds_training(own)):
        raise ConfigError(
            f"the settings of {system.name!r} must be a dataclass, and `train` in it must hold the settings of training",
            seen=f"config_type={getattr(kind, '__name__', kind)!r}",
            do="declare them with @dataclass(frozen=True, kw_only=True); leave `train` out, or give it the type TrainConfig",
        )
    if own is not None:
        return system.config_type
    added = ("train", TrainConfig, field(default_factory=TrainConfig))
    is_frozen = bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    return make_dataclass(kind.__name__, [added], bases=(kind,), frozen=is_frozen, kw_only=True)


def _holds_training(own: FieldOf[Any]) -> bool:
    made = own.default if own.default_factory is MISSING else own.default_factory()
    return isinstance(made, TrainConfig)


def settled(system: System[ConfigT], config: ConfigT) -> ConfigT:
    """The configuration with nothing left open that follows from the data."""
    return system.settle(config) if system.settle is not None else config


def train_settings(config: object) -> TrainConfig:
    """The settings of training in an instance of `settings_type(system)`."""
    train = getattr(config, "train", None)
    if not isinstance(train, TrainConfig):
        raise ConfigError(
            "these settings hold none of training",
            seen=f"{type(config).__name__} without `train`",
            do="make them with settings_type(system)(...)",
        )
    return train


def with_train(config: ConfigT, train: TrainConfig) -> ConfigT:
    """The same settings with others of training."""
    whole: Any = config
    return cast("ConfigT", replace(whole, train=train))
