"""How a run is trained: one set of settings, and what the words people bring mean in it.

`samples_per_step` decides the optimisation; `batch_size`, memory and devices only decide how a step is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from truebatch.errors import ConfigError
from truebatch.planning.config import DEFAULT_SAMPLES_PER_STEP, PlanConfig
from truebatch.planning.row_widths import choose_atom_cells, choose_row_widths
from truebatch.planning.rows import Ints, Layout
from truebatch.training.optim.lr_schedules import Schedule, Shape

Precision = Literal["fp32", "bf16", "fp16"]
Switch = Literal["on", "off", "compare"]
NonFinite = Literal["raise", "skip", "skip_then_raise", "roll_back"]
WhenTooLarge = Literal["raise", "quarantine"]
Exactness = Literal["rounding", "bits"]
DIGEST_EVERY = 100
"""Steps between digests of a run with `exactness: bits` that names no number."""
PATCHES = "patches"
"""The name of the cost that `TrainConfig.patches` limits."""
CHOOSABLE = ("precision", "layout", "cells", "compile", "workers")
"""Settings that a run can choose itself, in that order."""
ROWS: dict[str, str] = {"padded": "padded rows", "packed": "packed rows"}
"""Of each layout, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of a training run.

    >>> from truebatch import TrainConfig
    >>> TrainConfig(batch_size=8, gradient_accumulation_steps=4, devices=2).num_samples_per_step()
    64
    """

    epochs: int = 1
    """Times every sample is seen."""
    max_steps: int | None = None
    """Stop after this many steps, wherever the epoch is."""
    samples_per_step: int | None = None
    """Samples of one update, over all devices; by default batch_size x gradient_accumulation_steps x devices."""
    batch_size: int | None = None
    """Most samples of one forward pass on one device."""
    gradient_accumulation_steps: int = 1
    """Only a factor in the default of samples_per_step: accumulation is a cut, not another result."""
    devices: int = 1
    """Processes that share a step."""
    shard: bool = False
    """Deal parameters, gradients and optimiser state out over the devices (FSDP2), instead of a copy on each."""
    layout: Layout = "padded"
    """One sample a row, or samples end to end."""
    cells: int | None = None
    """Most cells of one forward pass; `truebatch fit` measures it."""
    pairs: int | None = None
    """Most query-key pairs of one forward pass."""
    patches: int | None = None
    """Most image patches (or tiles, as the processor of a model counts them) of one forward pass, beside `cells`."""
    exactness: Exactness = "rounding"
    """How equal a step is under another cut: up to `rounding`, or to its last `bits`, with the same parameters on any number
    of devices and after any restart."""
    atom_cells: int | None = None
    """exactness: bits: cells of an atom, the part of a step that is never cut; by default as the lengths of the samples ask."""
    digest_every: int | None = None
    """Steps between digests of all parameters, which `truebatch diff` compares; by default 100 with exactness: bits."""
    true_batch: Switch = "on"
    """`off` runs one sample at a time; `compare` runs both for `compare_steps` steps and stops if they differ."""
    compare_steps: int = 3
    check_samples: int = 8
    """Samples of the first step that are run alone and as cut before the first update; 0 leaves the check out."""
    learning_rate: float = 1e-3
    schedule: Shape = "constant"
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    """What the schedule ends with."""
    restarts: int = 1
    """Cosines of the schedule `cosine_restarts`."""
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Largest norm of the gradient; None does not clip."""
    precision: Precision = "fp32"
    gradient_checkpointing: bool = False
    """Compute activations again in backward instead of keeping them."""
    compile: bool = False
    """Compile the layers of the model for packed rows of a few widths, the widest at most `cells`; each is compiled once."""
    seed: int = 0
    workers: int = 0
    """Processes that load samples."""
    nonfinite: NonFinite = "raise"
    """What to do with a step whose loss or gradient is NaN or infinite."""
    nonfinite_limit: int = 3
    """skip_then_raise: steps in a row; roll_back: times in a run."""
    oom: WhenTooLarge = "raise"
    """What to do with a sample that does not fit into memory alone: stop and name it, or leave it out and count it."""
    validate_every: int | None = None
    """Steps between validations; by default once an epoch."""
    patience: int | None = None
    """Validations without an improvement before training stops; None never stops early."""
    min_delta: float = 0.0
    """How much lower the validation loss must be to count as an improvement."""
    save_every: int | None = None
    """Steps between checkpoints; by default once an epoch, more rarely where that would take over 5% of the time."""
    keep: int = 2
    """Checkpoints kept beside the best one."""
    allow: tuple[str, ...] = ()
    """Couplings between samples that are accepted by name; the log then says 'equal in distribution'."""
    track: tuple[str, ...] = ()
    """Trackers that get every record, by name: tensorboard, wandb, swanlab, trackio, mlflow, and so on."""
    stuck_seconds: float | None = 1800.0
    """A run without a finished step for this long is reported with all stacks and exits with 75; None never."""
    window: int = 4096
    """Samples of a stream that are read and planned together, rounded up to whole steps; a stream needs max_steps."""
    limit: int | None = None
    """Train on the first samples only: a quick try."""
    choose: tuple[str, ...] = ()
    """Settings that the run chooses itself, of precision, layout, cells, compile and workers; commands let it choose those
    that nobody gave. What was chosen is kept with the run."""

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "gradient_accumulation_steps",
            "devices",
            "compare_steps",
            "window",
            "nonfinite_limit",
            "restarts",
        ):
            _check(name, getattr(self, name), least=1)
        for name in (
            "max_steps",
            "samples_per_step",
            "batch_size",
            "cells",
            "pairs",
            "patches",
            "validate_every",
            "save_every",
            "limit",
            "atom_cells",
            "digest_every",
        ):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), least=1)
        for name in ("warmup_steps", "workers", "seed", "check_samples"):
            _check(name, getattr(self, name), least=0)
        _check("keep", self.keep, least=1)
        for name, choices in (
            ("precision", Precision),
            ("true_batch", Switch),
            ("nonfinite", NonFinite),
            ("oom", WhenTooLarge),
            ("exactness", Exactness),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(
                    f"{name} is not known", seen=f"{name}={getattr(self, name)!r}", do=f"use one of {get_args(choices)}"
                )
        _check_choose(self)
        _check_rates(self)
        _check_exactness(self)
        _check_compile(self)
        _check_shard(self)

    @classmethod
    def auto(cls, **settings: Any) -> TrainConfig:
        """These settings; the run chooses all of `CHOOSABLE` that are not among them.

        >>> from truebatch import TrainConfig
        >>> TrainConfig.auto(samples_per_step=64, precision="fp32").choose
        ('layout', 'cells', 'compile', 'workers')
        """
        return cls(**{"choose": tuple(name for name in CHOOSABLE if name not in settings), **settings})

    def lr_schedule(self) -> Schedule:
        """The learning rate as a function of the step."""
        floor = self.min_learning_rate / self.learning_rate if self.learning_rate else 0.0
        return Schedule(shape=self.schedule, warmup_steps=self.warmup_steps, floor=floor, restarts=self.restarts)

    def num_samples_per_step(self) -> int:
        """Samples of one update: as given, or from the words people bring."""
        if self.samples_per_step is not None:
            return self.samples_per_step
        if self.batch_size is None:
            return DEFAULT_SAMPLES_PER_STEP
        return self.batch_size * self.gradient_accumulation_steps * self.devices

    def plan_config(self, lengths: Ints | None = None) -> PlanConfig:
        """What a step is, and what a forward pass may hold. `true_batch: off` holds one sample.

        With compiled layers, rows of samples of these `lengths` have one of a few widths.
        """
        if self.true_batch == "off":
            return PlanConfig(samples=1, samples_per_step=self.num_samples_per_step(), seed=self.seed)
        if self.exactness == "bits":
            return PlanConfig(
                layout=self.layout,
                cells=self.atom_width(lengths),
                atoms=True,
                samples_per_step=self.num_samples_per_step(),
                seed=self.seed,
            )
        widths = () if lengths is None else self._row_widths(lengths)
        return PlanConfig(
            layout=self.layout,
            cells=widths[0] if widths else self.cells,
            pairs=self.pairs,
            costs={} if self.patches is None else {PATCHES: self.patches},
            samples=self.batch_size,
            samples_per_step=self.num_samples_per_step(),
            seed=self.seed,
            row_widths=widths,
        )

    def atom_width(self, lengths: Ints | None) -> int:
        """Cells of an atom: as given, else as these lengths and the size of a step ask, on any machine alike."""
        if self.atom_cells is not None:
            return self.atom_cells
        if lengths is None:
            raise ConfigError(
                "the width of an atom follows from the lengths of all samples, and these are not known",
                seen="exactness='bits', atom_cells=None, a stream",
                do="give atom_cells, at least the length of the longest sample",
            )
        return choose_atom_cells(lengths, samples_per_step=self.num_samples_per_step())

    def digest_steps(self) -> int | None:
        """Steps between digests; None for none."""
        default = DIGEST_EVERY if self.exactness == "bits" else None
        return default if self.digest_every is None else self.digest_every

    def _row_widths(self, lengths: Ints) -> tuple[int, ...]:
        if not self.compile or self.cells is None:
            return ()
        samples = self.num_samples_per_step()
        return choose_row_widths(
            lengths, cells=self.cells, samples_per_step=samples, ranks=self.devices, seed=self.seed
        )

    def describe_step(self, *, is_layout_open: bool = False) -> str:
        """One line for the start of a run: what a step is and how it is cut."""
        if self.exactness == "bits":
            return (
                f"{self.num_samples_per_step():,} samples per step over {self.devices} device(s); each forward pass holds one "
                "atom, whatever the budget"
            )
        limits = {"samples": self.batch_size, "cells": self.cells, "pairs": self.pairs, PATCHES: self.patches}
        held = ", ".join(f"{n:,} {name}" for name, n in limits.items() if n is not None)
        held = f"at most {held}" if held else "all samples of its device"
        if self.true_batch == "off":
            held = "1 sample (true_batch: off)"
        rows = "padded or packed rows" if is_layout_open else ROWS[self.layout]
        return (
            f"{self.num_samples_per_step():,} samples per step over {self.devices} device(s); "
            f"each forward pass holds {held}, in {rows}"
        )


def _check(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}",
            seen=f"{name}={value!r}",
            do=f"give {name} as an integer, {least} or more",
        )


def _check_choose(config: TrainConfig) -> None:
    object.__setattr__(config, "choose", tuple(config.choose))
    unknown = [name for name in config.choose if name not in CHOOSABLE]
    if unknown:
        raise ConfigError(
            "a run cannot choose this setting itself", seen=f"choose={unknown[0]!r}", do=f"use some of {CHOOSABLE}"
        )


def _check_compile(config: TrainConfig) -> None:
    if {"layout", "cells", "compile"} & set(config.choose):
        return  # checked when nothing is left to choose
    is_wide = config.cells is not None or config.exactness == "bits"
    if config.compile and (config.layout != "packed" or not is_wide or config.true_batch == "off"):
        raise ConfigError(
            "compiled layers need rows of one shape",
            seen=f"compile=True, layout={config.layout!r}, cells={config.cells}, true_batch={config.true_batch!r}",
            do="set layout='packed' and cells, the width of every row, or leave compile out",
        )


def _check_exactness(config: TrainConfig) -> None:
    if config.exactness != "bits":
        if config.atom_cells is not None:
            raise ConfigError(
                "only a run with exactness: bits has atoms",
                seen=f"atom_cells={config.atom_cells}, exactness={config.exactness!r}",
                do="set exactness='bits', or leave atom_cells out; cells is the budget of a forward pass",
            )
        return
    against = {"true_batch": ("off",), "oom": ("quarantine",)}
    wrong = [f"{name}={getattr(config, name)!r}" for name, words in against.items() if getattr(config, name) in words]
    wrong += [f"allow={list(config.allow)}"] if config.allow else []
    if wrong:
        raise ConfigError(
            "a step cannot have the same bits under any cut with this setting",
            seen=f"exactness='bits', {', '.join(wrong)}",
            do="leave it out: with exactness: bits every sample is run, in its atom, and nothing is drawn but by sample",
        )


def _check_shard(config: TrainConfig) -> None:
    if not config.shard:
        return
    reasons = {
        "devices=1": (config.devices == 1, "one process has nothing to share its parameters with"),
        "exactness='bits'": (config.exactness == "bits", "exactness: bits needs whole parameters on every rank"),
        "true_batch='compare'": (
            config.true_batch == "compare",
            "every forward pass of sharded parameters needs all ranks, which have different numbers of samples one by one",
        ),
        "oom='quarantine'": (
            config.oom == "quarantine",
            "samples cannot be left out where parameters are sharded",
        ),
        "compile=True": (config.compile, "compiled layers were not compared with sharded parameters"),
    }
    for seen, (is_wrong, why) in reasons.items():
        if is_wrong:
            raise ConfigError(why, seen=f"shard=True, {seen}", do=_INSTEAD[seen.partition("=")[0]])


_INSTEAD = {
    "devices": "give devices=2 or more, or leave shard out: a checkpoint in shards is loaded whole, too",
    "exactness": "leave shard out, or train with exactness='rounding'",
    "true_batch": "leave true_batch out; check_samples compares samples of the first step with one by one",
    "oom": "use oom='raise'; a lowered budget is then saved, and the run resumes with it when it is started again",
    "compile": "leave compile out, or shard",
}


def _check_rates(config: TrainConfig) -> None:
    numbers: dict[str, float | None] = {
        "learning_rate": config.learning_rate,
        "min_learning_rate": config.min_learning_rate,
        "weight_decay": config.weight_decay,
        "min_delta": config.min_delta,
        "max_grad_norm": config.max_grad_norm,
        "stuck_seconds": config.stuck_seconds,
    }
    wrong = {k: v for k, v in numbers.items() if v is not None and not (math.isfinite(v) and v >= 0)}
    if wrong or config.min_learning_rate > config.learning_rate:
        raise ConfigError(
            "rates are finite numbers of 0 or more, and the last learning rate is not above the first",
            seen=str(wrong) if wrong else f"{config.learning_rate=}, {config.min_learning_rate=}",
            do="for example learning_rate=1e-3, min_learning_rate=1e-5",
        )
