"""The settings of a system and those of its training as one: what a YAML file, a run and a proof of it hold."""

from __future__ import annotations

from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any

from truebatch.errors import ConfigError
from truebatch.system import System
from truebatch.training.settings import TrainConfig


def settings_type(system: System) -> type[Any]:
    """The system's settings with those of training under `train`, as one dataclass: one YAML file holds both."""
    kind = system.config_type
    if not is_dataclass(kind) or any(f.name == "train" for f in fields(kind)):
        raise ConfigError(
            f"the settings of {system.name!r} must be a dataclass without a field `train`",
            seen=f"config_type={getattr(kind, '__name__', kind)!r}",
            do="declare them with @dataclass(frozen=True, kw_only=True); `train` holds the settings of training",
        )
    trained = system.train_type or TrainConfig
    own = ("train", trained, field(default_factory=trained))
    is_frozen = bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    return make_dataclass(kind.__name__, [own], bases=(kind,), frozen=is_frozen, kw_only=True)


def settled(system: System, config: Any) -> Any:
    """The configuration with nothing left open that follows from the data."""
    return system.settle(config) if system.settle is not None else config
