"""Callbacks: the schedule of the loss, which follows the stays seen, and the collapse detector.

every check: the same stays of the training data -> posteriors in eval mode -> signals -> judgement -> log, action
"""

from __future__ import annotations

from collections.abc import Mapping
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
EVENTS = {
    "alarm": "posterior alarm",
    "recovered": "posterior recovered",
    "too sharp": "posterior too sharp",
}


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
        config = self.detector.config
        if step % config.check_frequency:
            return CallbackAction()
        line = self.detector.check(step, probe_signals(self.model, self.probe, config))
        if config.action == "anneal" and self.detector.is_alarmed and line["state"] != "healthy":
            self._anneal()
        line |= {"beta_factor": self.objective.beta_factor, "free_bits_factor": self.objective.free_bits_factor}
        self._write(step, line)
        return self._wish(line)

    def _wish(self, line: Mapping[str, Any]) -> CallbackAction:
        action = self.detector.config.action
        is_good = line["grace"] or line["state"] == "healthy"
        said = [f"{EVENTS[event]}: {'; '.join(line['reasons']) or line['state']}" for event in line["events"]]
        stop = f"posterior collapse since step {self.detector.first_bad_step}: {'; '.join(line['reasons'])}"
        is_over = action == "stop" and "alarm" in line["events"]
        return CallbackAction(keep=action != "warn" and is_good, stop=stop if is_over else "", say="; ".join(said))

    def _anneal(self) -> None:
        factor = self.detector.config.anneal_factor
        self.objective.beta_factor = max(self.objective.beta_factor * factor, SMALLEST_FACTOR)
        self.objective.free_bits_factor = min(self.objective.free_bits_factor / factor, 1 / SMALLEST_FACTOR)

    def _write(self, step: int, line: Mapping[str, Any]) -> None:
        """One line on rank 0; what a killed run wrote after its last checkpoint is removed first."""
        if self.log is not None and rank() == 0:
            log = open_metrics(self.log, step=self.last_step or None)
            log.write(step, {k: v for k, v in line.items() if k != "step"})
            log.close()
        self.last_step = step

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
