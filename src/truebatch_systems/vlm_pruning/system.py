"""Vision-token pruning as one `System`: `truebatch train vlm_pruning`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from truebatch.hf.pretrained import without_chatter
from truebatch.planning.lengths.measured_values import Measured
from truebatch.training.callbacks import Callback
from truebatch.training.checkpoint.tensor_files import write_tensors
from truebatch.training.data import TrainData
from truebatch.training.optim.param_groups import Group, default_group
from truebatch.training.system import System, Task, TaskCommands
from truebatch_systems.vlm_pruning.backbones.load import encoder_of, load_backbone
from truebatch_systems.vlm_pruning.config import PruningConfig
from truebatch_systems.vlm_pruning.data.datasets import load_split
from truebatch_systems.vlm_pruning.data.encode import (
    EncodedSamples,
    SampleEncoder,
    encoded_fields,
    fixed_image_tokens,
    measure_tokens,
)
from truebatch_systems.vlm_pruning.data.toy_shapes import Split
from truebatch_systems.vlm_pruning.eval.evaluate import evaluate
from truebatch_systems.vlm_pruning.eval.generate import generate
from truebatch_systems.vlm_pruning.eval.plots import show
from truebatch_systems.vlm_pruning.model.masks import check_budget
from truebatch_systems.vlm_pruning.model.model import PrunedVLM
from truebatch_systems.vlm_pruning.train.callbacks import Clock, FreshJudge
from truebatch_systems.vlm_pruning.train.objective import PruningObjective
from truebatch_systems.vlm_pruning.train.param_groups import pruning_groups

WEIGHTS, ABOUT = "pruning.safetensors", "pruning.json"
_ONLY_AT_THE_END = 2**31
"""Steps between validations that no run reaches; the last step is validated in any case."""


def _samples(config: PruningConfig, split: Split) -> EncodedSamples:
    return EncodedSamples(load_split(config.dataset_settings, split), _encoder(config))


def _encoder(config: PruningConfig) -> SampleEncoder:
    return encoder_of(config.backbone_settings, config.method_settings)


def _measure(train: EncodedSamples, terms: Sequence[str], samples: Sized) -> Measured:
    """Tokens of every sample, its vision tokens included; each counts once in every term."""
    lengths = measure_tokens(train.encoder, [train.samples[at] for at in range(len(samples))])
    return Measured(
        lengths=lengths,
        counts={term: np.ones(len(lengths), dtype=np.int64) for term in terms},
        found="tokens with image placeholders expanded",
    )


def build_model(config: PruningConfig) -> PrunedVLM:
    """The backbone of the settings with new pruner heads, drawn from the seed of training."""
    encoder = _encoder(config)
    backbone = load_backbone(config.backbone_settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = PrunedVLM(backbone, encoder.family, config.method_settings)
    if config.method_settings.stage == "pruning":
        check_budget(model.method, num_layers=model.num_layers, tokens=fixed_image_tokens(encoder))
    return model


def make_groups(config: PruningConfig, model: nn.Module) -> Sequence[Group]:
    """One optimiser for a backbone that learns; else one each for pruners, merger and discriminator."""
    assert isinstance(model, PrunedVLM)
    if model.method.stage == "backbone":
        return [default_group(model, config.train)]
    return pruning_groups(model, config.train)


def num_steps(config: PruningConfig, num_samples: int) -> int:
    """Steps of a whole run: what all schedules take as their end."""
    limited = min(num_samples, config.train.limit or num_samples)
    each = -(-limited // config.train.num_samples_per_step())
    whole = config.train.epochs * each
    return min(config.train.max_steps or whole, whole)


def _callbacks(
    config: PruningConfig, number: int, objective: PruningObjective, model: nn.Module, folder: Path
) -> Sequence[Callback]:
    assert isinstance(model, PrunedVLM)
    clock = Clock(objective, num_steps(config, number))
    chance = config.method_settings.disc_reinit_prob
    if model.judges_optimiser is None or chance == 0:
        return [clock]
    return [clock, FreshJudge(model, model.judges_optimiser, chance=chance, seed=config.train.seed)]


def _settle(config: PruningConfig) -> PruningConfig:
    """Layers that were left open; and `enable_true_batch: false` is one sample at a time, with the same results."""
    encoder = _encoder(config)
    depth = encoder.images.config.get_text_config().num_hidden_layers
    config = _judged_at_the_end(replace(config, method_settings=config.method_settings.for_depth(depth)))
    if config.backbone_settings.mllm_settings.enable_true_batch or config.train.true_batch == "off":
        return config
    return replace(config, train=replace(config.train, true_batch="off"))


def _judged_at_the_end(config: PruningConfig) -> PruningConfig:
    """While the price of a token is still rising, a model loses less the more it keeps: it is judged at the end."""
    method, train = config.method_settings, config.train
    if method.stage != "pruning" or method.budget_of == "sample" or train.validate_every is not None:
        return config
    return replace(config, train=replace(train, validate_every=_ONLY_AT_THE_END))


def _describe(config: PruningConfig) -> list[str]:
    encoder = _encoder(config)
    method, fixed = config.method_settings, fixed_image_tokens(encoder)
    tokens = "as many vision tokens as each image gives" if fixed is None else f"{fixed} vision tokens an image"
    lines = [f"backbone: {config.backbone_settings.name} ({encoder.family.model_type}), {tokens}"]
    if method.stage == "pruning":
        budget = f"{method.token_budget} tokens" if method.use_token_num_target else f"{method.kept_share:.0%}"
        lines.append(f"pruning after layers {list(method.pruning_layers)}; budget {budget} in an average layer")
        if method.use_token_num_target and fixed is not None and method.token_budget >= fixed:
            lines.append(
                f"nothing has to be dropped: an image has {fixed} vision tokens, the budget is {method.token_budget};"
                " lower target_token_num"
            )
    return lines


def _save(config: PruningConfig, model: nn.Module, folder: Path) -> None:
    """A trained backbone as transformers loads it; else the trained parts and the settings to use them with."""
    assert isinstance(model, PrunedVLM)
    if model.method.stage == "backbone":
        saved: Any = model.backbone
        with without_chatter():
            saved.save_pretrained(folder)
        _encoder(config).tokenizer.save_pretrained(folder)
        return
    write_tensors(
        folder / WEIGHTS, {name: value.detach().cpu().contiguous() for name, value in _learned(model).items()}
    )
    about = {"backbone": asdict(config.backbone_settings), "method": asdict(config.method_settings)}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _learned(model: PrunedVLM) -> Mapping[str, torch.Tensor]:
    return {n: value for n, value in model.state_dict().items() if not n.startswith("backbone.")}


def prepare_task(config: PruningConfig) -> Task:
    """The images and questions of a configuration, with model and loss."""
    train, validation = _samples(config, "train"), _samples(config, "validation")
    objective = PruningObjective(method=config.method_settings)
    return Task(
        data=TrainData(
            samples=train,
            fields=encoded_fields(train.encoder.family),
            validation=validation if len(validation) else None,
        ),
        measure=partial(_measure, train, objective.terms),
        test=partial(_samples, config, "test"),
        build_model=partial(build_model, config),
        objective=objective,
        groups=partial(make_groups, config),
        callbacks=partial(_callbacks, config, len(train), objective),
        save=partial(_save, config),
        commands=TaskCommands(
            describe=partial(_describe, config), evaluate=partial(evaluate, config), show=partial(show, config)
        ),
    )


VLM_PRUNING = System(
    name="vlm_pruning",
    config_type=PruningConfig,
    prepare=prepare_task,
    settle=_settle,
    restore_model=lambda config, weights: build_model(config),
    generate=generate,
)
