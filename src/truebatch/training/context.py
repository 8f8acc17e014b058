"""What the parts of a run share: all that is settled before the first step, and how the run ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from truebatch.data.fetch import Dataset
from truebatch.html_repr import html_table
from truebatch.interrupts import Interruption
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.limits_table import limited_costs
from truebatch.planning.plan import Plan, build_plan
from truebatch.training.callbacks import Logger
from truebatch.training.checkpoint.save_pace import SavePace
from truebatch.training.checks.batch_coupling import Coupling
from truebatch.training.checks.equality import Equality
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.distributed.collectives import num_ranks
from truebatch.training.logging.metrics_jsonl import MetricsLog
from truebatch.training.run_dir.run_dir import RunFolder
from truebatch.training.run_dir.signals import StopFlag
from truebatch.training.run_dir.watchdog import Watchdog
from truebatch.training.step import StepEngine
from truebatch.training.stream import SampleStream
from truebatch.training.train_state import EndReason
from truebatch.training.validation import ValidationSet

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended."""

    step: int
    records: Sequence[Record]
    """One for every step of this process's part of the run; earlier ones stand in metrics.jsonl."""
    best_loss: float | None
    why: str
    """Why it ended, in words."""
    end: EndReason = EndReason.ALL_STEPS_DONE
    """Why it ended, for programs."""

    @property
    def is_interrupted(self) -> bool:
        """True if the run was asked to stop, and a second start resumes it."""
        return self.end is EndReason.INTERRUPTED

    @property
    def exit_code(self) -> int:
        """0 when done; 1 when a check stopped the run; 75 when interrupted and a second start resumes it."""
        return self.end.exit_code

    def raise_if_interrupted(self) -> None:
        """For a program that continues after training: a signal that ended the training ends the program too."""
        if self.is_interrupted:
            raise Interruption(self.why)

    def _repr_html_(self) -> str:
        shown = [record for record in self.records if "loss" in record]
        step = max(1, len(shown) // 10)
        rows = [
            (r["step"], r["loss"], r.get("tokens", ""), r.get("seconds", "")) for r in [*shown[:-1:step], *shown[-1:]]
        ]
        title = f"after step {self.step}: {self.why}"
        return html_table(rows, header=("step", "loss", "tokens", "seconds"), title=title)


@dataclass(slots=True, eq=False)
class EpochPlans:
    """The plan of each epoch, made once; only that of the last epoch asked for is held."""

    measured: Measured
    config: PlanConfig
    _last: Plan | None = None

    def of(self, epoch: int) -> Plan:
        """The plan of an epoch, the same on every rank."""
        if self._last is None or self._last.epoch != epoch:
            measured = self.measured
            self._last = build_plan(
                measured.lengths,
                self.config,
                epoch=epoch,
                ranks=num_ranks(),
                costs=limited_costs(measured, self.config),
                counts=measured.counts,
            )
        return self._last


class Plans(Protocol):
    """The plan of each epoch of a dataset, or of each window of a stream."""

    @property
    def config(self) -> PlanConfig:
        """How all of them are made."""

    @property
    def measured(self) -> Measured:
        """Lengths of the samples that are planned now."""

    def of(self, epoch: int) -> Plan:
        """The plan of this epoch or window, the same on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """Everything a run needs, settled before its first step."""

    engine: StepEngine
    data: TrainData
    plans: Plans
    config: TrainConfig
    num_steps: int
    couplings: list[Coupling]
    """Allowed by name; the first step may add what only running shows."""
    run: RunFolder | None
    stop: StopFlag
    say: Callable[[str], None]
    validation: ValidationSet | None = None
    loggers: Sequence[Logger] = ()
    records: list[Record] = field(default_factory=list)
    watchdog: Watchdog | None = None
    """Learns of every step: a run that no longer moves is reported with its stacks."""

    save_pace: SavePace = field(default_factory=SavePace)
    """When the end of an epoch is saved."""
    equality: list[Equality | None] = field(default_factory=list)
    """What the check before the first update has found, once it is made; None where an earlier start made it."""

    @property
    def samples(self) -> Dataset:
        """What the plan of now is of: all samples, or the window of a stream that is at hand."""
        return self.data.samples.at_hand if isinstance(self.data.samples, SampleStream) else self.data.samples

    @property
    def first_id(self) -> int:
        """The id of the plan's sample 0."""
        return self.data.samples.at_hand.start.first_id if isinstance(self.data.samples, SampleStream) else 0

    def log_record(self, log: MetricsLog | None, record: Record) -> None:
        """One record to the log and to the loggers."""
        if log is not None:
            log.write(record["step"], {k: v for k, v in record.items() if k != "step"})
        for logger in self.loggers:
            logger.record(record)
