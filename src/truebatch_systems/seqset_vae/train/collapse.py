"""Posterior collapse, seen as what it is: latents that no longer tell sets apart.

mean and variance of many sets -> signals -> judgement -> alarm after some bad checks, over after some good ones

Raw KL alone does not tell: it is high for latents that are the same for every set, and low on purpose while beta is
small. So the information between sets and latents counts, and the first steps do not. A posterior that has become too
sharp is another fault, with a warning of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from truebatch_systems.seqset_vae.config import DetectorConfig
from truebatch_systems.seqset_vae.model.autoencoder import Posterior
from truebatch_systems.seqset_vae.train.loss import kl_per_dimension

State = Literal["healthy", "collapsed", "uninformative"]
Severity = Literal["none", "yellow", "orange", "red"]
AT_LIMIT = 0.99
"""A log variance this near to its clamp lies on it."""


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
    is_sharp: bool

    @property
    def is_bad(self) -> bool:
        """Collapsed, in one way or the other. Too sharp is not."""
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
    """Collapsed, uninformative or healthy, with every reason; and whether the posterior is too sharp."""
    total = signals.units * len(signals.kl)
    share, active = sum(signals.collapsed) / total, sum(signals.active) / total
    information = sum(signals.information)
    found: list[tuple[State, str]] = []
    if share >= config.collapsed_share:
        found.append(("collapsed", f"{share:.0%} of the dimensions are the prior"))
    if active < config.active_share:
        found.append(("uninformative", f"{sum(signals.active)} of {total} units vary over sets"))
    if information < config.min_information:
        found.append(("uninformative", f"{information:.3g} nats between a set and its latents"))
    if signals.gap is not None and signals.gap < config.min_gap:
        found.append(("uninformative", f"latents of other sets change reconstruction by {signals.gap:.2%}"))
    states = [state for state, _ in found]
    is_sharp = min(signals.variance) < config.sharp_variance or max(signals.at_limit) > 0.5
    state: State = "collapsed" if "collapsed" in states else (states or ["healthy"])[0]
    return Judgement(state=state, reasons=tuple(words for _, words in found), is_sharp=is_sharp)


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

    def check(self, step: int, signals: Signals) -> dict[str, Any]:
        """Take one check in; the line of the log it makes. `events` are what changed: alarm, recovered, too sharp."""
        judgement = judge(signals, self.config)
        is_grace = step <= self.grace_steps
        self.num_checks += 1
        events = [] if is_grace else self._move(step, judgement)
        return {
            "step": step,
            "state": judgement.state,
            "severity": self._severity(judgement, is_grace),
            "alarmed": self.is_alarmed,
            "too_sharp": judgement.is_sharp,
            "grace": is_grace,
            "events": events,
            "reasons": list(judgement.reasons),
            **asdict(signals),
        }

    def _move(self, step: int, judgement: Judgement) -> list[str]:
        events: list[str] = []
        if judgement.is_sharp and not self.is_sharp:
            events.append("too sharp")
        self.is_sharp = judgement.is_sharp
        if judgement.is_bad:
            self.bad_in_row, self.good_in_row = self.bad_in_row + 1, 0
            self.first_bad_step = step if self.first_bad_step is None else self.first_bad_step
        else:
            self.bad_in_row, self.good_in_row = 0, self.good_in_row + 1
            self.first_bad_step = self.first_bad_step if self.is_alarmed else None
        if not self.is_alarmed and self.bad_in_row >= self.config.enter:
            self.is_alarmed, self.num_alarms = True, self.num_alarms + 1
            events.append("alarm")
        elif self.is_alarmed and self.good_in_row >= self.config.leave:
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
            setattr(self, name, value)
