"""The tasks `dpo` and `reward` of `truebatch train hf`: data, model, reference and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.export import export_model
from truebatch.hf.finetune.lora import add_lora, check_peft
from truebatch.hf.finetune.preference.config import PreferenceConfig
from truebatch.hf.finetune.preference.evaluate import FIELDS, evaluate_pairs
from truebatch.hf.finetune.preference.known_reference import REFERENCE_FIELD, PairsWithReference, know_reference
from truebatch.hf.finetune.preference.objective import NLL, TERM, PairObjective, ReferenceModel
from truebatch.hf.finetune.preference.pair_rows import PARTS
from truebatch.hf.finetune.preference.read_pairs import encode_pairs
from truebatch.hf.finetune.quantize import nf4_config, without_inference_kernels
from truebatch.hf.finetune.token_store import TokenStore
from truebatch.hf.finetune.tokenize import FileTokenizer
from truebatch.hf.heads.heads import head_of
from truebatch.hf.preference.sharing import row_way
from truebatch.hf.pretrained import (
    load_configuration,
    load_tokenizer,
    load_weights,
    num_positions,
    shape_of,
    sketch_model,
    tokenizer_fingerprint,
    without_dropout,
)
from truebatch.planning.lengths.measure import content_hash
from truebatch.planning.lengths.measured_values import Measured, cache_folder
from truebatch.planning.rows import Layout
from truebatch.training.callbacks import Callback
from truebatch.training.data import TrainData
from truebatch.training.system import Task, TaskCommands


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPairs:
    """What is known about a run before its weights are loaded."""

    train: TokenStore
    validation: TokenStore | None
    configuration: Any
    dropouts: Mapping[str, float]
    """What was set to 0: two answers are compared, and noise would differ between them."""
    objective: PairObjective
    content: str
    """A hash of the data file."""
    news: list[str]
    """What is known once the weights are loaded."""


def prepare_preference(config: FinetuneConfig) -> Task:
    """The pairs of a configuration, encoded, with the user's model, its reference and the loss."""
    ready = _prepare(config)
    data, known = TrainData(samples=ready.train, fields=FIELDS, validation=ready.validation), None
    if config.preference.precompute_reference:
        known = {"train": PairsWithReference(ready.train)}
        if ready.validation is not None:
            known["validation"] = PairsWithReference(ready.validation)
        data = TrainData(
            samples=known["train"], fields=(*FIELDS, REFERENCE_FIELD), validation=known.get("validation")
        )  # fmt: skip
    return Task(
        data=data,
        callbacks=None if known is None else partial(_know_reference, config, ready, known),
        measure=partial(_measure, ready),
        build_model=partial(_build_model, config, ready),
        objective=ready.objective,
        save=partial(_save, config, ready),
        commands=TaskCommands(
            describe=partial(_describe, config, ready),
            choose_layout=partial(_choose_layout, ready),
            sketch=None if config.load_in_4bit else partial(_sketch, config, ready),
            evaluate=partial(evaluate_pairs, config, ready.objective),
        ),
    )


def _prepare(config: FinetuneConfig) -> PreparedPairs:
    _refuse(config)
    if config.lora:
        check_peft()
    configuration = pair_configuration(config)
    dropouts = without_dropout(configuration)
    encoder = FileTokenizer(
        task=config.task,
        tokenizer=load_tokenizer(config.model, config.chat_template),
        fingerprint=tokenizer_fingerprint(config.model, config.chat_template),
        known_labels={},
        max_length=config.max_length or num_positions(configuration),
        overlong=config.overlong,
        cache=cache_folder(),
    )
    train = encode_pairs(encoder, config.data)
    validation = encode_pairs(encoder, config.validation) if config.validation else None
    head = head_of(shape_of(configuration, config.task))
    objective = PairObjective(head=head, config=config.preference, reference=_reference(config))
    return PreparedPairs(train, validation, configuration, dropouts, objective, content_hash(config.data), [])


def _refuse(config: FinetuneConfig) -> None:
    if config.streaming:
        raise ConfigError(
            "pairs are not read as a stream", seen=f"task={config.task}, streaming=true", do="leave streaming out"
        )
    given = config.preference
    plain = PreferenceConfig(center_rewards=given.center_rewards, share_prompts=given.share_prompts)
    if config.task == "reward" and given != plain:
        named = [f.name for f in fields(given) if getattr(given, f.name) != getattr(plain, f.name)]
        raise ConfigError(
            "a model of rewards has one loss, so settings of dpo would be ignored",
            seen=f"task=reward, {', '.join(f'preference.{name}={getattr(given, name)}' for name in named)}",
            do="leave out all of preference but center_rewards and share_prompts",
        )
    if given.precompute_reference and config.train.shard:
        raise ConfigError(
            "the reference is asked before training by ranks that hold the whole model",
            seen="preference.precompute_reference=true, train.shard=true",
            do="leave one of them out",
        )
    if config.task == "dpo" and given.center_rewards:
        raise ConfigError(
            "center_rewards is for a model of rewards",
            seen=f"task=dpo, center_rewards={given.center_rewards}",
            do="leave it out",
        )


def pair_configuration(config: FinetuneConfig) -> Any:
    """The configuration of the model; one number for each answer in a model of rewards."""
    configuration = load_configuration(config.model)
    if config.task == "reward":
        configuration.num_labels = 1
        configuration.problem_type = "regression"
    return configuration


def _reference(config: FinetuneConfig) -> ReferenceModel:
    """The model as it is in its folder; with an adapter, the trained one without it."""
    if config.lora:
        return ReferenceModel(None)

    def load() -> nn.Module:
        configuration = pair_configuration(config)
        without_dropout(configuration)
        return load_weights(config.model, configuration, config.task, seed=config.train.seed)[0]

    return ReferenceModel(load)


def _know_reference(
    config: FinetuneConfig,
    ready: PreparedPairs,
    known: Mapping[str, PairsWithReference],
    model: nn.Module,
    folder: Path,
) -> Sequence[Callback]:
    """Before the first step of a run, and before a checkpoint is loaded; nothing is left to call later."""
    layout = _choose_layout(ready, model)[0] if "layout" in config.train.choose else config.train.layout
    content = ready.content if config.validation is None else f"{ready.content} {content_hash(config.validation)}"
    know_reference(config, ready.objective, known, model, folder, layout=layout, content=content)
    return ()


def _measure(ready: PreparedPairs, samples: Sized) -> Measured:
    """Cells of every pair, its prompt counted once."""
    number = len(samples)
    counts = {TERM: np.ones(number, dtype=np.int64)}
    if not ready.objective.gives_rewards and ready.objective.config.own_loss_weight:
        counts[NLL] = ready.train.columns[PARTS].values.reshape(-1, 3)[:number, 1]
    return Measured(
        lengths=ready.train.columns["input_ids"].lengths()[:number],
        counts=counts,
        found="tokens of prompts and answers, prompts counted once",
        fingerprint=f"{ready.content}-{number}",
    )


def _build_model(config: FinetuneConfig, ready: PreparedPairs) -> nn.Module:
    if config.task == "dpo" and config.preference.has_reference and not config.preference.precompute_reference:
        ready.objective.reference.prepare()
    model, new = load_pair_model(config, deepcopy(ready.configuration))
    if new:
        ready.news[:] = [f"new weights, drawn from seed {config.train.seed}: {', '.join(new)}"]
    return model


def load_pair_model(config: FinetuneConfig, configuration: Any) -> tuple[nn.Module, list[str]]:
    """The model that is trained, its adapter included, and the names of its new weights."""
    bits = nf4_config(config.train.precision) if config.load_in_4bit else None
    model, new = load_weights(config.model, configuration, config.task, seed=config.train.seed, quantization=bits)
    if bits is not None:
        without_inference_kernels(model)
    if config.lora:
        add_lora(model, config.task, rank=config.lora_rank, alpha=config.lora_alpha)
    return model, new


def restore_pair_model(config: FinetuneConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model of a run."""
    return load_pair_model(config, pair_configuration(config))[0]


def _sketch(config: FinetuneConfig, ready: PreparedPairs) -> nn.Module:
    model = sketch_model(deepcopy(ready.configuration), config.task)
    if config.lora:
        add_lora(model, config.task, rank=config.lora_rank, alpha=config.lora_alpha)
    return model


def _choose_layout(ready: PreparedPairs, model: nn.Module) -> tuple[Layout, str]:
    """Packed where a trial on this very model gave what copies give, else padded."""
    if torch.cuda.is_available():
        model.to("cuda")
    parts = ready.train.columns[PARTS].values.reshape(-1, 3)
    longest = int((parts[:, 0] + parts[:, 1:].max(1)).max())
    way = row_way(ready.objective.head, model, longest=longest)
    if way.way == "padded":
        return "padded", f"layout: padded ({way.why})"
    if way.way == "copied" or not ready.objective.config.share_prompts:
        return "packed", f"layout: packed, each answer with a copy of its prompt ({way.why or 'as asked for'})"
    return "packed", "layout: packed, a prompt is laid out once for both answers, as a trial on this model allows"


def _describe(config: FinetuneConfig, ready: PreparedPairs) -> Sequence[str]:
    lines = [f"{config.data}: {ready.train.notes[0]}", *ready.train.notes[1:]]
    if ready.validation is not None:
        lines += [f"{config.validation}: {ready.validation.notes[0]}", *ready.validation.notes[1:]]
    if config.task == "dpo":
        named = "the model without its adapter" if config.lora else f"a frozen copy of {config.model}"
        given = config.preference
        if given.precompute_reference:
            named = f"{'the model without its adapter' if config.lora else config.model}, asked once before training"
        lines.append(
            f"loss {given.loss_type}, beta {given.beta:g}" + (f"; reference: {named}" if given.has_reference else "")
        )
    if ready.dropouts:
        rates = ", ".join(f"{name}={rate}" for name, rate in ready.dropouts.items())
        lines.append(f"dropout is set to 0 for training on pairs (was {rates})")
    return [*lines, *ready.news]


def _save(config: FinetuneConfig, ready: PreparedPairs, model: nn.Module, folder: Path) -> None:
    """The model (or its adapter) and the tokenizer, as transformers loads them."""
    export_model(  # a reward's one number is not known to the base's folder
        config, ready.configuration, model, folder, dropouts=ready.dropouts, with_configuration=config.task == "reward"
    )
    load_tokenizer(config.model, config.chat_template).save_pretrained(folder)
