"""The small models of the benchmark `exactness`, each as its command trains it: data, loss, schedules, keyed dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.training.callbacks import Callback
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.optim.param_groups import Group
from truebatch.training.system import Task
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig, ChineseTrainConfig
from truebatch_systems.chinese_gpt.system import CHINESE_GPT
from truebatch_systems.seqset_vae.config import (
    DetectorConfig,
    GeneratorConfig,
    ModelConfig,
    SeqSetConfig,
    SeqSetTrainConfig,
)
from truebatch_systems.seqset_vae.system import SEQSET_VAE

SAMPLES, LONGEST = 320, 60


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactnessCase:
    """A model and its samples, read once; what is built anew in every process."""

    task: Task
    data: TrainData
    settings: TrainConfig
    """Of a run with `exactness: bits`; what a run changes is its budget, its devices and when it saves."""

    def callbacks(self, model: nn.Module, folder: Path) -> Sequence[Callback]:
        """Schedules that belong to the loss."""
        return self.task.callbacks(model, folder) if self.task.callbacks is not None else ()

    def groups(self, model: nn.Module) -> Sequence[Group] | None:
        """Optimisers of its own; None for the default."""
        return None if self.task.groups is None else self.task.groups(model)


def _settings(kind: type[TrainConfig], atom_cells: int, **more: Any) -> TrainConfig:
    settings = {
        "samples_per_step": 16, "epochs": 1000, "exactness": "bits", "atom_cells": atom_cells, "digest_every": 1,
        "patience": None, "stuck_seconds": None, "schedule": "cosine", "warmup_steps": 5, **more,
    }  # fmt: skip
    return kind(**settings)


def _case(task: Task, settings: TrainConfig) -> ExactnessCase:
    return ExactnessCase(task=task, data=task.measured_data(), settings=settings)


def _chinese_gpt() -> ExactnessCase:
    train = _settings(ChineseTrainConfig, 48, layout="packed")
    assert isinstance(train, ChineseTrainConfig)
    config = ChineseGPTConfig(
        embedding_dim=32, hidden_dim=64, layers=2, heads=2, max_seq_len=48, dropout=0.1, embedded_statements=240,
        embedded_dialogues=160, train=train,
    )  # fmt: skip
    return _case(CHINESE_GPT.prepare(config), train)


def _seqset_vae() -> ExactnessCase:
    train = _settings(SeqSetTrainConfig, 640)
    assert isinstance(train, SeqSetTrainConfig)
    config = SeqSetConfig(
        generator=GeneratorConfig(stays=200, median_hours=6.0, num_variables=16),
        model=ModelConfig(
            embedding_dim=12, reduced_dim=8, latent_dim=16, inducing_points=3, transformer_layers=1, feedforward_dim=16
        ),
        detector=DetectorConfig(enabled=False), train=train,
    )  # fmt: skip
    return _case(SEQSET_VAE.prepare(config), train)


def _hugging_face(model_type: str) -> ExactnessCase:
    """Random tokens of many lengths for a tiny model of this architecture."""
    build = partial(tiny_model, model_type)
    model = build()
    head, draw = head_of(model), np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(2.8, 0.7, SAMPLES), 2, LONGEST).astype(int)
    texts = [draw.integers(5, 150, int(length)) for length in lengths]
    samples = [{"input_ids": ids, "labels": ids} for ids in texts]
    data = TrainData(samples=samples[32:], fields=head.fields, validation=samples[:32])
    task = Task(data=data, build_model=build, objective=HeadObjective(head=head))
    return _case(task, _settings(TrainConfig, 64, layout="packed", learning_rate=1e-3))


CASES: dict[str, Callable[[], ExactnessCase]] = {
    "chinese_gpt": _chinese_gpt,
    "tiny Qwen3": partial(_hugging_face, "qwen3"),
    "tiny Qwen3-MoE": partial(_hugging_face, "qwen3_moe"),
    "seqset_vae": _seqset_vae,
}


def settled(case: ExactnessCase, **changes: Any) -> TrainConfig:
    """The settings of one start of a run."""
    return replace(case.settings, **changes)
