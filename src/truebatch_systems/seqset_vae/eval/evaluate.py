"""A trained model on many stays: probabilities and latents, in the order of the stays, however they were batched.

Figures of a trained model: discrimination, calibration and their intervals, per stay and after 24 or 48 hours.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import load_steps
from truebatch.errors import DataError
from truebatch.io.atomic_files import atomic_text, atomic_write, write_text
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.reports.plots import curves
from truebatch.training.system import SizedDataset
from truebatch_systems.seqset_vae.config import NAFLD, SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import FIELDS, Stays, measure_stays, take_stays
from truebatch_systems.seqset_vae.data.prepare import PreparedStays, stays_cut_at
from truebatch_systems.seqset_vae.eval.metrics import calibration, summarise
from truebatch_systems.seqset_vae.model.model import SeqSetVAE
from truebatch_systems.seqset_vae.train.loss import Forward, look_at

CELLS = {"cpu": 8192, "cuda": 131_072}
"""Most cells of a forward pass without gradients; a longer stay goes alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """What the model knows of every set, stay after stay."""

    mean: NDArray[np.float32]
    """[sets, Z] the deepest posterior mean: the set alone."""
    logvar: NDArray[np.float32]
    state: NDArray[np.float32]
    """[sets, Z] the set with all that came before it."""


def predict_logits(model: nn.Module, stays: Stays, *, cells: int | None = None) -> NDArray[np.float64]:
    """[N, C] in the order of the stays; deterministic, and the same for any `cells`."""
    found: NDArray[np.float64] | None = None
    for batch, seen in _forwards(model, stays, cells):
        logits = seen.outputs.logits.double().cpu().numpy()
        if found is None:
            found = np.zeros((len(stays), logits.shape[1]))
        found[list(batch.sample_ids)] = logits
    assert found is not None
    return found


def predict(model: nn.Module, stays: Stays, *, cells: int | None = None) -> NDArray[np.float64]:
    """[N, C] the probability of every class."""
    logits = predict_logits(model, stays, cells=cells)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return found


def find_latents(model: nn.Module, stays: Stays, *, cells: int | None = None) -> Latents:
    """The latents of every set of every stay."""
    parts: dict[str, list[Any]] = {name: [None] * len(stays) for name in ("mean", "logvar", "state")}
    for batch, seen in _forwards(model, stays, cells):
        back, lengths = seen.inputs.layout.back, list(seen.inputs.rows.lengths)
        outputs = seen.outputs
        of_sets = {
            "mean": outputs.posterior.mean[:, -1][back],
            "logvar": outputs.posterior.logvar[:, -1][back],
            "state": outputs.states,
        }
        for name, values in of_sets.items():
            for sample_id, part in zip(batch.sample_ids, torch.split(values.float().cpu(), lengths), strict=True):
                parts[name][sample_id] = part.numpy()
    return Latents(**{name: np.concatenate(column) for name, column in parts.items()})


def _forwards(model: nn.Module, stays: Stays, cells: int | None) -> Iterator[tuple[MicroBatch, Forward]]:
    assert isinstance(model, SeqSetVAE)
    device = next(model.parameters()).device
    measured = measure_stays(stays)
    most = max(cells or CELLS.get(device.type, CELLS["cpu"]), int(measured.lengths.max()))
    plan = build_plan(measured.lengths, PlanConfig(cells=most, samples_per_step=len(stays)))
    for step in load_steps(plan, stays, FIELDS):
        for batch in step:
            with torch.no_grad():
                yield batch, look_at(model, batch.to(device))


PREDICTIONS, CALIBRATION, RELIABILITY = "predictions.csv", "calibration.csv", "calibration.svg"


def evaluate(
    config: SeqSetConfig, ready: PreparedStays, model: nn.Module, stays: SizedDataset, out: Path
) -> dict[str, Any]:
    """Figures on these stays, their predictions in `out`, and the figures of what was known after `cut_hours`."""
    assert isinstance(stays, Stays)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    if config.mode == "pretrain":
        raise DataError(
            "a pretrained model has no classifier to judge",
            seen="mode=pretrain",
            do="fine-tune it (mode=finetune, init_from=RUN), or export its latents: truebatch seqset_vae export RUN",
        )
    risk = predict(model, stays)
    write_predictions(out / PREDICTIONS, stays, risk)
    figures = summarise(stays.labels, risk[:, 1])
    is_labelled = stays.labels >= 0
    write_calibration(calibration(stays.labels[is_labelled], risk[is_labelled, 1]), out)
    return {**figures, "after_hours": _after_hours(config, ready, model, stays)}


def write_predictions(path: Path, stays: Stays, risk: NDArray[np.float64]) -> None:
    """One line a stay: its id, its label (empty if it has none) and the probability of label 1."""
    with atomic_text(path) as file:
        writer = csv.writer(file)
        writer.writerow(["id", "label", "probability"])
        for name, label, row in zip(stays.ids, stays.labels, risk, strict=True):
            writer.writerow([name, "" if label < 0 else int(label), f"{row[1]:.9g}"])


def export_latents(ready: PreparedStays, model: nn.Module, path: Path) -> dict[str, int]:
    """All latents of all splits in one .npz file; the number of sets of each split.

    For a split `s`: `s/ids` [N], `s/starts` [N + 1], `s/minute`, `s/mean`, `s/logvar` and `s/state`, one row a set.
    """
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    arrays: dict[str, Any] = {}
    for split, stays in ready.splits.items():
        found = find_latents(model, stays)
        arrays |= {
            f"{split}/ids": np.array(stays.ids),
            f"{split}/labels": stays.labels,
            f"{split}/starts": stays.set_starts,
            f"{split}/minute": stays.set_minute,
            f"{split}/mean": found.mean,
            f"{split}/logvar": found.logvar,
            f"{split}/state": found.state,
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
    return {split: len(arrays[f"{split}/mean"]) for split in ready.splits}


def write_calibration(rows: Sequence[Mapping[str, float]], out: Path) -> None:
    """Probability against share of positives, as a table and, where matplotlib is installed, as a picture."""
    with atomic_text(out / CALIBRATION) as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if find_spec("matplotlib") is None:
        return
    points = [row["mean_probability"] for row in rows], [row["share_positive"] for row in rows]
    lines = {"honest": ([0.0, 1.0], [0.0, 1.0]), "this model": points}
    picture = curves(lines, title="Calibration", x="probability", y="share of label 1")
    write_text(out / RELIABILITY, picture)


def _after_hours(config: SeqSetConfig, ready: PreparedStays, model: nn.Module, stays: Stays) -> dict[str, Any]:
    """Figures of the first hours, of stays that were still there: a stay that had ended would tell its own end."""
    split = next((name for name, one in ready.splits.items() if one.ids == stays.ids), None)
    if split is None or config.data == NAFLD:
        return {}
    last = stays.set_minute[stays.set_starts[1:] - 1]
    found: dict[str, Any] = {}
    for hours in config.cut_hours:
        known = stays_cut_at(config, hours, split)
        there = np.flatnonzero((last >= hours * 60) & (stays.labels >= 0))
        if known is None or len(np.unique(stays.labels[there])) < 2:
            found[f"{hours:g}"] = {"stays": len(there), "note": "not stays of both classes"}
            continue
        part = take_stays(known, there)
        found[f"{hours:g}"] = summarise(part.labels, predict(model, part)[:, 1])
    return found
