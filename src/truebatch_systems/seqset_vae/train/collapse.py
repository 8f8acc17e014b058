"""Posterior collapse, seen as what it is: latents that no longer tell sets apart.

mean and variance of many sets -> signals of each level -> judgement -> alarm after some bad checks, over after good ones

Raw KL alone does not tell: it is high for latents that are the same for every set, and low on purpose while beta is
small. So the information between sets and latents counts, and the first steps do not. Levels are judged apart: a deep
level can be dead beside a healthy shallow one. The end of a run is judged however few checks there were. A posterior
that has become too sharp is another fault, with a warning of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from truebatch_systems.seqset_vae.config import DetectorConfig
from truebatch_systems.seqset_vae.model.autoencoder import Posterior
from truebatch_systems.seqset_vae.train.loss import kl_per_dimension

State = Literal["healthy", "collapsed", "uninformative", "exploding"]
Severity = Literal["none", "yellow", "orange", "red"]
AT_LIMIT = 0.99
"""A log variance this near to its clamp lies on it."""
GROWTH = 0.05
"""Information that has grown by this share of the least information (`min_information`) since the last check is rising."""
MOST_GRACE = 0.5
"""Of a run: beta may rise for longer, but nobody waits for more than half of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """What one check has measured, a level at a time, the deepest last."""

    num_sets: int
    units: int
    """Dimensions of a level."""
    kl: tuple[float, ...]
    """Nats from the prior, the mean over sets: no weight, no floor."""
    information: tuple[float, ...]
    """Nats between sets and latents: the KL less that of all sets taken as one Gaussian."""
    active: tuple[int, ...]
    """Units whose mean varies over sets."""
    collapsed: tuple[int, ...]
    """Dimensions that are the prior for every set."""
    variance: tuple[float, ...]
    """Of the posterior, the mean over sets and dimensions."""
    at_limit: tuple[float, ...]
    """Share of dimensions whose log variance lies on its lower clamp."""
    gap: float | None = None
    """How much worse reconstruction is with the latents of other sets, as a share; None if it was not tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the signals of one check mean."""

    state: State
    reasons: tuple[str, ...]
    """What is wrong, with the level where one is meant."""
    is_sharp: bool

    @property
    def is_bad(self) -> bool:
        """Collapsed, in one way or the other, or exploding. Too sharp is not."""
        return self.state != "healthy"


def measure_signals(
    posterior: Posterior, config: DetectorConfig, *, logvar_limit: float, gap: float | None = None
) -> Signals:
    """The signals of the posteriors of many sets; one transfer from the device for all of them."""
    mean, logvar = posterior.mean.double(), posterior.logvar.double()  # [M, L, Z]
    variance = logvar.exp()
    kl = kl_per_dimension(Posterior(mean, logvar)).mean(0)  # [L, Z]
    spread = mean.var(0, correction=0)
    collapsed = (
        (kl < config.kl_threshold)
        & (mean.abs().mean(0) < config.mean_threshold)
        & ((variance.mean(0) - 1).abs() < config.variance_threshold)
    )
    table = torch.stack(
        [
            kl.sum(-1),
            (kl - _kl_of_all(mean, variance, spread)).sum(-1),
            (spread > config.active_threshold).double().sum(-1),
            collapsed.double().sum(-1),
            variance.mean((0, 2)),
            (logvar.mean(0) <= -AT_LIMIT * logvar_limit).double().mean(-1),
        ]
    ).tolist()
    return Signals(
        num_sets=len(mean), units=mean.shape[2], kl=tuple(table[0]), information=tuple(table[1]),
        active=tuple(round(n) for n in table[2]), collapsed=tuple(round(n) for n in table[3]),
        variance=tuple(table[4]), at_limit=tuple(table[5]), gap=gap,
    )  # fmt: skip


def _kl_of_all(mean: Tensor, variance: Tensor, spread: Tensor) -> Tensor:
    """[L, Z]: the KL of one Gaussian with the mean and variance of all sets together."""
    together = variance.mean(0) + spread
    return 0.5 * (together + mean.mean(0).square() - 1 - together.log())


def judge(signals: Signals, config: DetectorConfig) -> Judgement:
    """Collapsed, uninformative, exploding or healthy, with every reason; and whether the posterior is too sharp.

    One bad level makes the posterior bad, however healthy the others are.
    """
    found = [fault for level in range(len(signals.kl)) for fault in _faults_of_level(signals, level, config)]
    if config.min_gap and signals.gap is not None and not signals.gap >= config.min_gap:
        found.append(("uninformative", f"latents of other sets change reconstruction by {signals.gap:.2%}"))
    states = [state for state, _ in found]
    order: tuple[State, ...] = ("exploding", "collapsed", "uninformative")
    state: State = next((one for one in order if one in states), "healthy")
    is_sharp = min(signals.variance) < config.sharp_variance or max(signals.at_limit) > 0.5
    return Judgement(state=state, reasons=tuple(words for _, words in found), is_sharp=is_sharp)


def _faults_of_level(signals: Signals, level: int, config: DetectorConfig) -> list[tuple[State, str]]:
    """What is wrong with one level, each with its state."""
    units, of = signals.units, len(signals.kl)
    kl, information = signals.kl[level], signals.information[level]
    active, collapsed = signals.active[level], signals.collapsed[level]
    if not kl <= config.max_kl * units:  # NaN too
        return [("exploding", f"in level {level + 1} of {of}: a KL of {kl:.3g} nats over {units} units")]
    found: list[tuple[State, str]] = []
    if collapsed >= config.collapsed_share * units:
        found.append(("collapsed", f"in level {level + 1} of {of}: {collapsed} of {units} dimensions are the prior"))
    if active < config.active_share * units:
        found.append(("uninformative", f"in level {level + 1} of {of}: {active} of {units} units vary over sets"))
    if not information >= config.min_information:
        words = f"in level {level + 1} of {of}: {information:.3g} nats between a set and its latents"
        found.append(("uninformative", words))
    return found


def count_grace_steps(config: DetectorConfig, *, num_steps: int, warmup_steps: int) -> int:
    """Steps without an alarm: a share of the run, longer while beta is rising, half of the run at most."""
    wanted = max(math.ceil(config.grace_share * num_steps), warmup_steps + config.check_frequency)
    return min(wanted, int(MOST_GRACE * num_steps))


@dataclass(kw_only=True, slots=True)
class Detector:
    """Goes from check to check. All it remembers is plain data, saved with the run."""

    config: DetectorConfig
    grace_steps: int
    """Checks up to this step are written down and judged, but alarm nobody: beta is still rising."""
    bad_in_row: int = 0
    good_in_row: int = 0
    is_alarmed: bool = False
    is_sharp: bool = False
    num_checks: int = 0
    num_alarms: int = 0
    first_bad_step: int | None = None
    """The first bad check of the alarm, or of the row that may become one."""
    last_information: tuple[float, ...] = ()
    """Of the levels, at the check before."""

    def check(self, step: int, signals: Signals, *, is_end: bool = False) -> dict[str, Any]:
        """Take one check in; the line of the log it makes. `events` are what changed: alarm, recovered, too sharp.

        At the end of a run one bad check is enough, one good check ends an alarm, and there is no grace.
        """
        judgement = judge(signals, self.config)
        is_rising = judgement.state in ("collapsed", "uninformative") and self._is_rising(signals)
        self.last_information = signals.information
        is_grace = step <= self.grace_steps and not is_end
        self.num_checks += 1
        events = [] if is_grace else self._move(step, judgement, is_rising=is_rising, is_end=is_end)
        return {
            "step": step,
            "end": is_end,
            "state": judgement.state,
            "severity": self._severity(judgement, is_grace),
            "alarmed": self.is_alarmed,
            "too_sharp": judgement.is_sharp,
            "grace": is_grace,
            "rising": is_rising,
            "events": events,
            "reasons": list(judgement.reasons),
            **asdict(signals),
        }

    def _is_rising(self, signals: Signals) -> bool:
        """Every level that says too little says more than it did at the last check: it is waking up, not dead."""
        least = self.config.min_information
        pairs = list(zip(signals.information, self.last_information, strict=False))
        low = [(now, before) for now, before in pairs if not now >= least]
        return bool(low) and all(now - before > GROWTH * least for now, before in low)

    def _move(self, step: int, judgement: Judgement, *, is_rising: bool, is_end: bool) -> list[str]:
        events: list[str] = []
        if judgement.is_sharp and not self.is_sharp:
            events.append("too sharp")
        self.is_sharp = judgement.is_sharp
        if not judgement.is_bad:
            self.bad_in_row, self.good_in_row = 0, self.good_in_row + 1
            self.first_bad_step = self.first_bad_step if self.is_alarmed else None
        elif not is_rising or is_end:
            self.bad_in_row, self.good_in_row = self.bad_in_row + 1, 0
            self.first_bad_step = step if self.first_bad_step is None else self.first_bad_step
        enter, leave = (1, 1) if is_end else (self.config.enter, self.config.leave)
        if not self.is_alarmed and self.bad_in_row >= enter:
            self.is_alarmed, self.num_alarms = True, self.num_alarms + 1
            events.append("alarm")
        elif self.is_alarmed and self.good_in_row >= leave:
            self.is_alarmed, self.first_bad_step = False, None
            events.append("recovered")
        return events

    def _severity(self, judgement: Judgement, is_grace: bool) -> Severity:
        if self.is_alarmed:
            return "red"
        if is_grace or not judgement.is_bad:
            return "yellow" if judgement.is_sharp and not is_grace else "none"
        return "orange" if len(judgement.reasons) > 1 else "yellow"

    def state(self) -> dict[str, Any]:
        """Everything but the settings."""
        own = asdict(self)
        return {name: value for name, value in own.items() if name not in ("config", "grace_steps")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved detector was; an empty state is a new one."""
        fresh = Detector(config=self.config, grace_steps=self.grace_steps)
        for name, value in {**fresh.state(), **state}.items():
            setattr(self, name, tuple(value) if name == "last_information" else value)
