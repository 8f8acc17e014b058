"""Callbacks: the schedule of the loss, which follows the stays seen, and the collapse detector.

every check: the same stays of the training data -> posteriors in eval mode -> signals -> judgement -> log, action
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truebatch.batch.collate import collate
from truebatch.batch.microbatch import MicroBatch
from truebatch.planning.rows import padded_rows
from truebatch.reports.artifacts import keep_picture
from truebatch.reports.plots import curves
from truebatch.training.callbacks import CallbackAction
from truebatch.training.distributed.collectives import rank
from truebatch.training.logging.metrics_jsonl import open_metrics, read_metrics
from truebatch_systems.seqset_vae.config import DetectorConfig
from truebatch_systems.seqset_vae.data.admissions import FIELDS, Stays
from truebatch_systems.seqset_vae.model.autoencoder import Posterior
from truebatch_systems.seqset_vae.model.model import SeqSetVAE
from truebatch_systems.seqset_vae.train.collapse import Detector, Signals, measure_signals
from truebatch_systems.seqset_vae.train.loss import SeqSetObjective, look_at, reconstruction

CHECKS, PICTURE = "collapse.jsonl", "40-collapse"
SMALLEST_FACTOR = 2.0**-6
"""Annealing goes no further: beta is then as good as off."""
DECODER_STEPS = 100
"""At the end of a shorter run the latents are judged, but not whether the decoder uses them: it cannot have learned to."""
FAULTS = {
    "collapsed": "posterior collapse",
    "uninformative": "posterior collapse",
    "exploding": "exploding posterior",
}
"""States that are none of health, in words."""


class LossSchedule:
    """Tells the objective how many stays have been seen: a number of the step alone, so that no cut changes it."""

    name = "loss schedule"

    def __init__(self, objective: SeqSetObjective, samples_per_step: int) -> None:
        self.objective, self.samples_per_step = objective, samples_per_step

    def before_step(self, step: int) -> None:
        """Set the number of stays seen so far."""
        self.objective.stays_seen = step * self.samples_per_step

    def after_step(self, step: int) -> CallbackAction:
        """Nothing follows from a step."""
        return CallbackAction()

    def ended(self, step: int) -> None:
        """Nothing is left to do."""

    def state(self) -> Mapping[str, Any]:
        """The stays seen."""
        return {"stays_seen": self.objective.stays_seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The next step sets it anyway."""
        self.objective.stays_seen = int(state.get("stays_seen", 0))


class CollapseWatch:
    """Checks the posterior every so many steps and does what the settings say about it."""

    name = "collapse detector"

    def __init__(
        self, model: SeqSetVAE, objective: SeqSetObjective, probe: MicroBatch, detector: Detector, folder: Path | None
    ) -> None:
        self.model, self.objective, self.probe, self.detector = model, objective, probe, detector
        self.log = None if folder is None else folder / CHECKS
        self.last_step = 0

    def before_step(self, step: int) -> None:
        """Nothing to do before a step."""

    def after_step(self, step: int) -> CallbackAction:
        """A check if one is due, its line in the log, and what follows from it."""
        if not self._is_due(step):
            return CallbackAction()
        line = self._check(step, probe_signals(self.model, self.probe, self.detector.config))
        self._write(step, line)
        return self._wish(line)

    def at_end(self, step: int) -> CallbackAction:
        """The last word on the posterior: a bad one makes the run a failed check, whatever the action.

        The detector itself takes in only a check that was due, so that a run that gets more steps goes on as if it had
        not ended.
        """
        signals = probe_signals(self.model, self.probe, self.detector.config)
        verdict = replace(self.detector)
        if self._is_due(step):
            self._check(step, signals)
        if step < DECODER_STEPS:
            signals = replace(signals, gap=None)
        line = {**verdict.check(step, signals, is_end=True), **self._factors()}
        self._write(step, line, is_kept=self._is_due(step))
        if line["state"] == "healthy":
            return CallbackAction(say=_health(line))
        return CallbackAction(stop=_fault(line, verdict))

    def _is_due(self, step: int) -> bool:
        return step % self.detector.config.check_frequency == 0

    def _check(self, step: int, signals: Signals) -> dict[str, Any]:
        line = self.detector.check(step, signals)
        is_dying = line["state"] in ("collapsed", "uninformative")
        if self.detector.config.action == "anneal" and self.detector.is_alarmed and is_dying:
            self._anneal()
        return {**line, **self._factors()}

    def _factors(self) -> dict[str, float]:
        return {"beta_factor": self.objective.beta_factor, "free_bits_factor": self.objective.free_bits_factor}

    def _wish(self, line: Mapping[str, Any]) -> CallbackAction:
        action = self.detector.config.action
        is_good = line["grace"] or line["state"] == "healthy"
        said = [_event_words(event, line) for event in line["events"]]
        is_over = action == "stop" and "alarm" in line["events"]
        stop = _fault(line, self.detector) if is_over else ""
        return CallbackAction(keep=action != "warn" and is_good, stop=stop, say="; ".join(said))

    def _anneal(self) -> None:
        factor = self.detector.config.anneal_factor
        self.objective.beta_factor = max(self.objective.beta_factor * factor, SMALLEST_FACTOR)
        self.objective.free_bits_factor = min(self.objective.free_bits_factor / factor, 1 / SMALLEST_FACTOR)

    def _write(self, step: int, line: Mapping[str, Any], *, is_kept: bool = True) -> None:
        """One line on rank 0; what a killed run wrote after its last checkpoint is removed first.

        A line that is not kept is removed when the run gets more steps: without the end, nobody would have looked.
        """
        if self.log is not None and rank() == 0:
            log = open_metrics(self.log, step=self.last_step or None)
            log.write(step, {k: v for k, v in line.items() if k != "step"})
            log.close()
        self.last_step = step if is_kept else self.last_step

    def ended(self, step: int) -> None:
        """A picture of all checks for the report of the run."""
        if self.log is not None and rank() == 0:
            keep_checks(self.log.parent)

    def state(self) -> Mapping[str, Any]:
        """The detector, what annealing has done, and how far the log goes."""
        return {
            "detector": self.detector.state(),
            "beta_factor": self.objective.beta_factor,
            "free_bits_factor": self.objective.free_bits_factor,
            "last_step": self.last_step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there; from nothing, begin."""
        self.detector.restore(state.get("detector", {}))
        self.objective.beta_factor = float(state.get("beta_factor", 1.0))
        self.objective.free_bits_factor = float(state.get("free_bits_factor", 1.0))
        self.last_step = int(state.get("last_step", 0))


def _event_words(event: str, line: Mapping[str, Any]) -> str:
    """What has changed, for a line of the run."""
    if event == "alarm":
        return f"posterior alarm: {'; '.join(line['reasons'])}"
    return "posterior recovered" if event == "recovered" else "posterior too sharp"


def _fault(line: Mapping[str, Any], detector: Detector) -> str:
    return f"{FAULTS[line['state']]} since step {detector.first_bad_step}: {'; '.join(line['reasons'])}"


def _health(line: Mapping[str, Any]) -> str:
    """Active units and information of every level, for the end of a run."""
    levels = [
        f"in level {k + 1}: {active} of {line['units']} units active, {line['information'][k]:.3g} nats of information"
        for k, active in enumerate(line["active"])
    ]
    head = "the posterior is too sharp at the end" if line["too_sharp"] else "the posterior is healthy at the end"
    return f"{head}; {'; '.join(levels)}"


def make_probe(stays: Stays, window: int) -> MicroBatch:
    """Stays spread over the dataset with at least `window` sets together (or all there are), as one micro-batch."""
    order = np.argsort(np.arange(len(stays)) * 0.6180339887498949 % 1.0, kind="stable")  # evenly, whatever the number
    enough = int(np.searchsorted(np.cumsum(stays.num_sets[order]), window)) + 1
    ids = np.sort(order[:enough]).astype(np.int64)
    width = int(stays.num_events[ids].max())
    return collate([stays[int(i)] for i in ids], padded_rows(ids, width), FIELDS)


def probe_signals(model: SeqSetVAE, probe: MicroBatch, config: DetectorConfig) -> Signals:
    """The signals of a model on these stays; deterministic, and no part of training sees it."""
    device = next(model.parameters()).device
    seen = look_at(model, probe.to(device, non_blocking=True), decode=True)
    layout, outputs = seen.inputs.layout, seen.outputs
    assert outputs.decoded is not None
    # States are in the order of the stays: half the sets away is, as a rule, another stay.
    away = torch.roll(torch.arange(layout.num_sets, device=device), layout.num_sets // 2)
    foreign = outputs.posterior.mean[layout.back][away][layout.order]
    with torch.no_grad():
        other = model.decode(outputs.states[away], foreign, seen.inputs, None)
        own_loss, other_loss = (
            reconstruction(decoded, outputs.target, layout).mean() for decoded in (outputs.decoded, other)
        )
        gap = float(other_loss / own_loss) - 1
    posterior = Posterior(outputs.posterior.mean, outputs.posterior.logvar)
    return measure_signals(posterior, config, logvar_limit=model.settings.logvar_limit, gap=gap)


def keep_checks(run: Path) -> Path | None:
    """A picture of all checks of a run, kept for its report; None where there are none, or no matplotlib to draw."""
    lines = read_metrics(run / CHECKS)
    if not lines or find_spec("matplotlib") is None:
        return None
    steps = [line["step"] for line in lines]
    levels = range(len(lines[0]["kl"]))
    shown = {f"KL, level {k + 1}": (steps, [line["kl"][k] for line in lines]) for k in levels}
    shown |= {f"information, level {k + 1}": (steps, [line["information"][k] for line in lines]) for k in levels}
    shown["active units"] = (steps, [float(sum(line["active"])) for line in lines])
    marks = {event: float(line["step"]) for line in lines for event in line["events"]}
    picture = curves(shown, title="Posterior", x="step", y="nats; units", log_y=True, marks=marks)
    return keep_picture(run, PICTURE, picture)
