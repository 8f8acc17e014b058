"""The small run of the drill: trained, validated, saved and exported by what trains every system, in half a second.

Its model and its loss draw from every global generator, so that a run that does not give them back ends otherwise.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.planning.lengths.measured_values import Measured
from truebatch.training.checkpoint.retention import BEST, list_checkpoints
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.run_dir.run_dir import METRICS, read_status
from truebatch.training.system import System, Task
from truebatch.training.train_system import MODEL, Start, train_system

STEPS, BEGUN, SAVE_EVERY = 6, 2, 2
_TIMED = ("seconds", "tokens_per_second")
_WIDTH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the small run learns from."""

    num_samples: int = 12
    train: TrainConfig = field(default_factory=TrainConfig)


def run_tiny_training(
    folder: Path, *, keep: int, fresh: bool = False, earlier: bool = False, saved: Path | None = None
) -> None:
    """Start the small run in `folder`, or resume it; every save it has come past is noted in the file `saved`.

    `earlier` is a run with another configuration, which ends when the other has begun.
    """
    train = TrainConfig(
        epochs=STEPS, max_steps=BEGUN if earlier else STEPS, samples_per_step=4, batch_size=2, save_every=SAVE_EVERY,
        keep=keep, validate_every=1, learning_rate=0.05 if earlier else 0.1, allow=("dropout",), stuck_seconds=None,
    )  # fmt: skip
    loggers = () if saved is None else (_Notes(saved),)
    train_system(SYSTEM, Settings(train=train), Start(out=folder, fresh=fresh, loggers=loggers))


def end_of(folder: Path) -> dict[str, Any]:
    """What must be equal at the end of two runs, beside the time they took: status, log, marks, the newest checkpoint
    with the state of every generator, and the exported model."""
    checkpoints = folder / "checkpoints"
    newest = load_newest(checkpoints)
    manifest = list_checkpoints(checkpoints)[-1].manifest
    assert newest is not None
    assert manifest is not None
    return {
        "state": read_status(folder)["state"],
        "step": newest.checkpoint.step,
        "rejected": newest.rejected,
        "files": {name: facts.sha256 for name, facts in manifest.files.items()},
        "best": manifest.best,
        "best.json": _bytes_of(checkpoints / BEST),
        "best_is_there": manifest.best is not None and (checkpoints / f"step-{manifest.best.step}").is_dir(),
        "metrics": [{k: v for k, v in line.items() if k not in _TIMED} for line in read_metrics(folder / METRICS)],
        "model": {path.name: _bytes_of(path) for path in sorted((folder / MODEL).glob("*"))},
    }


def _bytes_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "absent"


@dataclass(frozen=True, slots=True)
class _Notes:
    """A line for every step that was saved: the record of the next one comes after it."""

    file: Path

    def begin(self, step: int, num_steps: int) -> None:
        pass

    def record(self, record: Mapping[str, Any]) -> None:
        before = record["step"] - 1
        if "loss" in record and before and before % SAVE_EVERY == 0:
            with self.file.open("a") as file:
                file.write(f"{before}\n")


class _Sum:
    """The squared error of the sum of a sample, times a number drawn from Python's and one from NumPy's generator."""

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        return {"error": batch.num_samples}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        inputs = batch["x"]
        error = (model(inputs) - inputs.sum(1, keepdim=True)).square().sum()
        if not model.training:
            return {"error": error}
        return {"error": error * (1 + random.random() + float(np.random.random()))}  # noqa: S311 - no secret


def _samples(seed: int, number: int) -> list[dict[str, Any]]:
    return [{"x": row} for row in np.random.default_rng(seed).normal(size=(number, _WIDTH)).astype(np.float32)]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, 16), nn.Dropout(0.5), nn.Linear(16, 1))


def _save(model: nn.Module, folder: Path) -> None:
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "weights.safetensors")


def _measure(samples: Sized) -> Measured:
    return Measured(lengths=np.ones(len(samples), dtype=np.int64), found="one cell a sample")


def _prepare(config: Settings) -> Task:
    data = TrainData(
        samples=_samples(0, config.num_samples), fields=[Field(name="x", kind="once")], validation=_samples(1, 4)
    )
    return Task(data=data, measure=_measure, build_model=_model, objective=_Sum(), save=_save)


SYSTEM = System(name="drill", config_type=Settings, prepare=_prepare)
