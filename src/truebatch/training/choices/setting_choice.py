"""A setting that was chosen with its reason, and what choosing it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from truebatch.training.choices.device_facts import DeviceFacts
from truebatch.training.data import TrainData
from truebatch.training.system import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingChoice:
    """One setting, and why."""

    setting: str
    value: Any
    why: str
    also: Mapping[str, Any] | None = None
    """Other settings that it implies."""

    @property
    def line(self) -> str:
        """For the start of a run, with the setting that overrides it. A layout comes with a line of its own."""
        if self.setting == "layout":
            return self.why
        return f"{self.setting}: {shown(self.value)}, {self.why} (--set train.{self.setting}=... overrides it)"


def shown(value: Any) -> str:
    """A value as it is written behind `--set`."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chooser:
    """What choosing needs, whatever is chosen."""

    task: Task
    model: nn.Module
    data: TrainData
    facts: DeviceFacts
    say: Callable[[str], None]
    """Told while something is measured."""
