"""Stays as one `System`: `truebatch train seqset_vae`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from truebatch.objective import Objective
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.rows import Ints
from truebatch.system import System
from truebatch.training.checkpoint.tensor_files import write_tensors
from truebatch.training.config import TrainConfig
from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import Stays, measure_stays, stay_fields, take_stays
from truebatch_systems.seqset_vae.data.prepare import prepare
from truebatch_systems.seqset_vae.eval.evaluate import evaluate
from truebatch_systems.seqset_vae.model.model import SeqSetVAE
from truebatch_systems.seqset_vae.train.callbacks import CollapseWatch, LossSchedule, make_probe
from truebatch_systems.seqset_vae.train.collapse import Detector
from truebatch_systems.seqset_vae.train.loss import CLASS, SeqSetObjective, balanced_weights
from truebatch_systems.seqset_vae.train.pretrained_weights import WEIGHTS, load_weights, read_weights

FROZEN = ("events", "encoder", "decoder")
"""Parts that a fine-tuning leaves as they are: the latents of a set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqSetTrainConfig(TrainConfig):
    """Settings of a training run, with the defaults of seqset_vae."""

    epochs: int = 10
    samples_per_step: int | None = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    max_grad_norm: float | None = 0.5
    patience: int | None = 5


def build_model(config: Any) -> SeqSetVAE:
    """The model of the settings, from their seed and from `init_from`; parts that do not train are frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = SeqSetVAE(config.model, torch.from_numpy(prepare(config).variables.vectors.copy()))
    if config.init_from is not None:
        load_weights(model, read_weights(config.init_from))
    if config.mode == "finetune" and config.freeze:
        for part in FROZEN:
            model.get_submodule(part).requires_grad_(False)
    return model


def make_objective(config: Any) -> SeqSetObjective:
    """The loss of the settings; weights of classes come from all training stays."""
    labels = prepare(config).train.labels
    counts = np.bincount(labels[labels >= 0], minlength=config.model.num_classes).tolist()
    return SeqSetObjective(loss=config.loss, mode=config.mode, class_weights=balanced_weights(counts))


def _measure(config: Any, samples: Any) -> Measured:
    """Events of every stay, and what each term of the loss is divided by. Budgets are in events: cells and pairs."""
    train = prepare(config).train
    stays = train if len(samples) == len(train) else take_stays(train, range(len(samples)))
    return replace(measure_stays(stays, _counts(config, stays)), costs={})


def _counts(config: Any, stays: Stays) -> dict[str, Ints]:
    per_stay = stays.num_sets if config.loss.reduction == "set" else np.ones(len(stays))
    labelled = stays.labels >= 0
    terms = SeqSetObjective(loss=config.loss, mode=config.mode).terms
    return {term: (labelled if term == CLASS else per_stay).astype(np.int64) for term in terms}


def _attend(config: Any, model: nn.Module, objective: Objective, folder: Path) -> Sequence[Any]:
    """The schedule of the loss, and the collapse detector where something is reconstructed."""
    assert isinstance(objective, SeqSetObjective)
    assert isinstance(model, SeqSetVAE)
    per_step = config.train.num_samples_per_step()
    schedule = LossSchedule(objective, per_step)
    if not config.detector.enabled or config.mode == "finetune":
        return [schedule]
    grace = -(-config.loss.beta_warmup // per_step) + config.detector.check_frequency
    detector = Detector(config=config.detector, grace_steps=grace)
    probe = make_probe(prepare(config).train, config.detector.window)
    return [schedule, CollapseWatch(model, objective, probe, detector, folder)]


def _describe(config: Any) -> list[str]:
    lines = list(prepare(config).lines)
    if config.init_from is not None:
        with torch.random.fork_rng(devices=[]):
            fresh = SeqSetVAE(config.model, torch.from_numpy(prepare(config).variables.vectors.copy()))
        lines += load_weights(fresh, read_weights(config.init_from)).lines()
    return lines


def _save(config: Any, model: nn.Module, folder: Path) -> None:
    """Weights as safetensors, and beside them what is needed to build the model again."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    write_tensors(folder / WEIGHTS, state)
    variables = prepare(config).variables
    about = {
        "model": asdict(config.model),
        "variables": list(variables.names),
        "mean": variables.mean.tolist(),
        "std": variables.std.tolist(),
    }
    (folder / "model.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


SEQSET_VAE = System(
    name="seqset_vae",
    config_type=SeqSetConfig,
    load=lambda config: prepare(config).train,  # type: ignore[arg-type, return-value]
    fields=lambda config: stay_fields(least_events=0 if config.use_dynamic_padding else config.max_events or 0),
    measure=_measure,
    build_model=build_model,
    objective=make_objective,
    train_type=SeqSetTrainConfig,
    validation=lambda config: prepare(config).validation,  # type: ignore[arg-type, return-value]
    test=lambda config: prepare(config).test,  # type: ignore[arg-type, return-value]
    evaluate=evaluate,
    attend=_attend,
    describe=_describe,
    save=_save,
)
