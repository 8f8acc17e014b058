"""Stays as one `System`: `truebatch train seqset_vae`."""

from __future__ import annotations

import json
from collections.abc import Sequence, Sized
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.rows import Ints
from truebatch.training.callbacks import Callback
from truebatch.training.checkpoint.tensor_files import write_tensors
from truebatch.training.data import TrainData
from truebatch.training.system import System, Task, TaskCommands
from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import Stays, measure_stays, stay_fields, take_stays
from truebatch_systems.seqset_vae.data.prepare import PreparedStays, prepare
from truebatch_systems.seqset_vae.data.variables import Variables
from truebatch_systems.seqset_vae.eval.evaluate import evaluate
from truebatch_systems.seqset_vae.model.model import SeqSetVAE
from truebatch_systems.seqset_vae.train.callbacks import CollapseWatch, LossSchedule, make_probe
from truebatch_systems.seqset_vae.train.collapse import Detector, count_grace_steps
from truebatch_systems.seqset_vae.train.loss import CLASS, SeqSetObjective, balanced_weights
from truebatch_systems.seqset_vae.train.pretrained_weights import WEIGHTS, load_weights, read_weights

FROZEN = ("events", "encoder", "decoder")
"""Parts that a fine-tuning leaves as they are: the latents of a set."""


def build_model(config: SeqSetConfig, ready: PreparedStays) -> SeqSetVAE:
    """The model of the settings, from their seed and from `init_from`; parts that do not train are frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = SeqSetVAE(config.model, torch.from_numpy(ready.variables.vectors.copy()))
    if config.init_from is not None:
        load_weights(model, read_weights(config.init_from))
    if config.mode == "finetune" and config.freeze:
        for part in FROZEN:
            model.get_submodule(part).requires_grad_(False)
    return model


def make_objective(config: SeqSetConfig, train: Stays) -> SeqSetObjective:
    """The loss of the settings; weights of classes come from all training stays."""
    labels = train.labels
    counts = np.bincount(labels[labels >= 0], minlength=config.model.num_classes).tolist()
    return SeqSetObjective(loss=config.loss, mode=config.mode, class_weights=balanced_weights(counts))


def _measure(config: SeqSetConfig, train: Stays, samples: Sized) -> Measured:
    """Events of every stay, and what each term of the loss is divided by. Budgets are in events: cells and pairs."""
    stays = train if len(samples) == len(train) else take_stays(train, range(len(samples)))
    return replace(measure_stays(stays, _counts(config, stays)), costs={})


def _counts(config: SeqSetConfig, stays: Stays) -> dict[str, Ints]:
    per_stay = stays.num_sets if config.loss.reduction == "set" else np.ones(len(stays))
    labelled = stays.labels >= 0
    terms = SeqSetObjective(loss=config.loss, mode=config.mode).terms
    return {term: (labelled if term == CLASS else per_stay).astype(np.int64) for term in terms}


def _callbacks(
    config: SeqSetConfig, ready: PreparedStays, objective: SeqSetObjective, model: nn.Module, folder: Path
) -> Sequence[Callback]:
    """The schedule of the loss, and the collapse detector where something is reconstructed."""
    assert isinstance(model, SeqSetVAE)
    per_step = config.train.num_samples_per_step()
    schedule = LossSchedule(objective, per_step)
    if not config.detector.enabled or config.mode == "finetune":
        return [schedule]
    grace = count_grace_steps(
        config.detector,
        num_steps=_num_steps(config, len(ready.train), per_step),
        warmup_steps=-(-config.loss.beta_warmup // per_step),
    )
    detector = Detector(config=config.detector, grace_steps=grace)
    probe = make_probe(ready.train, config.detector.window)
    return [schedule, CollapseWatch(model, objective, probe, detector, folder)]


def _num_steps(config: SeqSetConfig, num_stays: int, per_step: int) -> int:
    """Steps of the whole run."""
    stays = min(num_stays, config.train.limit or num_stays)
    steps = config.train.epochs * -(-stays // per_step)
    return min(steps, config.train.max_steps or steps)


def _describe(config: SeqSetConfig, ready: PreparedStays) -> list[str]:
    lines = list(ready.lines)
    if config.init_from is not None:
        with torch.random.fork_rng(devices=[]):
            fresh = SeqSetVAE(config.model, torch.from_numpy(ready.variables.vectors.copy()))
        lines += load_weights(fresh, read_weights(config.init_from)).lines()
    return lines


def _save(config: SeqSetConfig, variables: Variables, model: nn.Module, folder: Path) -> None:
    """Weights as safetensors, and beside them what is needed to build the model again."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    write_tensors(folder / WEIGHTS, state)
    about = {
        "model": asdict(config.model),
        "variables": list(variables.names),
        "mean": variables.mean.tolist(),
        "std": variables.std.tolist(),
    }
    (folder / "model.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def prepare_task(config: SeqSetConfig) -> Task:
    """The stays of a configuration, with model and loss."""
    ready = prepare(config)
    objective = make_objective(config, ready.train)
    fields = stay_fields(least_events=0 if config.use_dynamic_padding else config.max_events or ready.most_events)
    return Task(
        data=TrainData(samples=ready.train, fields=fields, validation=ready.validation),
        measure=partial(_measure, config, ready.train),
        test=lambda: ready.test,
        build_model=partial(build_model, config, ready),
        objective=objective,
        callbacks=partial(_callbacks, config, ready, objective),
        save=partial(_save, config, ready.variables),
        commands=TaskCommands(describe=partial(_describe, config, ready), evaluate=partial(evaluate, config, ready)),
    )


SEQSET_VAE = System(name="seqset_vae", config_type=SeqSetConfig, prepare=prepare_task)
