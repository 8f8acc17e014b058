"""The user's own Hugging Face model and data as one `System`: `truebatch train hf`."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.batch.key_dropout import key_dropout
from truebatch.errors import ConfigError
from truebatch.hf.attention.packed import packing_plan_of
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.embedding import (
    describe_embedding,
    head_for_pairs,
    longest_text,
    objective_for_pairs,
    save_sentence_files,
)
from truebatch.hf.finetune.evaluate import evaluate
from truebatch.hf.finetune.export import export_model
from truebatch.hf.finetune.generate import generate
from truebatch.hf.finetune.lora import add_lora, check_peft
from truebatch.hf.finetune.preference.system import prepare_preference, restore_pair_model
from truebatch.hf.finetune.quantize import nf4_config, without_inference_kernels
from truebatch.hf.finetune.text_pairs import encode_pairs
from truebatch.hf.finetune.token_store import TokenStore
from truebatch.hf.finetune.token_stream import HeadStream, TokenStream
from truebatch.hf.finetune.tokenize import FileTokenizer, encode_file
from truebatch.hf.finetune.vision.read_file import image_chat_reader
from truebatch.hf.finetune.vision.samples import ImageChatStore
from truebatch.hf.finetune.vision.tower import adapter_targets, freeze_tower
from truebatch.hf.forward_inputs import language_model
from truebatch.hf.heads.expert_balance import TERM as BALANCE
from truebatch.hf.heads.expert_balance import balanced_objective, is_balanced
from truebatch.hf.heads.heads import ModelHead, head_of
from truebatch.hf.heads.losses import IGNORE
from truebatch.hf.heads.objective import HeadObjective
from truebatch.hf.hub import fetch_model, is_hub_name
from truebatch.hf.mixers.trial_rows import without_router_outputs
from truebatch.hf.pretrained import (
    dropout_rates,
    load_configuration,
    load_tokenizer,
    load_weights,
    num_positions,
    shape_of,
    sketch_model,
    tokenizer_fingerprint,
    with_dropout,
    with_labels,
)
from truebatch.objective import Objective
from truebatch.planning.lengths.measure import content_hash
from truebatch.planning.lengths.measured_values import Measured, cache_folder
from truebatch.planning.rows import Ints, Layout
from truebatch.training.checks.batch_coupling import leaves_out_layers
from truebatch.training.data import TrainData
from truebatch.training.system import System, Task, TaskCommands
from truebatch.verification.choose_layout import choose_layout, is_proven

PAIRS = ("dpo", "reward")
"""Tasks with a better and a worse answer."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRun:
    """What is known about a run before its weights are loaded."""

    train: TokenStore | TokenStream | ImageChatStore
    validation: TokenStore | ImageChatStore | None
    configuration: Any
    """Of the model, with the classes of the data and without the dropouts that cannot be drawn for each sample."""
    dropouts: dict[str, float]
    """What was set to 0."""
    keyed: dict[str, float]
    """What is drawn for each sample."""
    head: ModelHead
    content: str
    """A hash of the data file."""
    news: list[str]
    """What is known once the weights are loaded."""

    @property
    def samples(self) -> Any:
        """To train on: a dataset, or a stream."""
        if isinstance(self.train, TokenStream):
            return HeadStream(self.train, self.head)
        return HeadSamples(self.train, self.head)

    @property
    def held_out(self) -> HeadSamples | None:
        """Never trained on."""
        return None if self.validation is None else HeadSamples(self.validation, self.head)


@dataclass(frozen=True, slots=True, eq=False)
class HeadSamples:
    """Encoded samples with what the head needs beside."""

    encoded: TokenStore | ImageChatStore
    head: ModelHead

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, sample_id: int, /) -> dict[str, Any]:
        return self.head.prepare(self.encoded[sample_id])

    @property
    def measured(self) -> Measured:
        """Tokens, labels and patches of every sample, from the encoded arrays: no sample is read."""
        return _measured(self.encoded, self.head, len(self.encoded), "")


def prepare(config: FinetuneConfig) -> PreparedRun:
    """Read and encode the data, and settle the configuration of the model; once. No weights are loaded."""
    _check_streaming(config)
    read = [config.data] if not config.streaming else []
    files = [*read, *([config.validation] if config.validation is not None else [])]
    return _prepare(config, tuple(content_hash(file) for file in files))


def _check_streaming(config: FinetuneConfig) -> None:
    if is_hub_name(config.data) and not config.streaming:
        raise ConfigError(
            f"there is no file {config.data}; a dataset of the Hub is read as a stream",
            seen=f"data={config.data}",
            do="add --set streaming=true and --set train.max_steps=N, or name a file",
        )


@lru_cache(maxsize=2)
def _prepare(config: FinetuneConfig, contents: tuple[str, ...]) -> PreparedRun:
    if config.lora:
        check_peft()
    configuration = load_configuration(config.model)
    train, validation = (_read_images if config.task == "vlm" else _read_texts)(config, configuration)
    with_labels(configuration, train.label_names)
    dropouts, keyed = _split_dropouts(config, configuration)
    with_dropout(configuration, dict.fromkeys(dropouts, 0.0))
    first = train.first() if isinstance(train, TokenStream) else train[0]
    head = head_of(shape_of(configuration, config.task), first)
    if config.task == "embedding":
        assert isinstance(train, TokenStore)
        head = head_for_pairs(head, config, train)
    content = contents[0] if contents else ""
    return PreparedRun(train, validation, configuration, dropouts, keyed, head, content, [])


def _read_texts(config: FinetuneConfig, configuration: Any) -> tuple[TokenStore | TokenStream, TokenStore | None]:
    encoder = FileTokenizer(
        task=config.task,
        tokenizer=load_tokenizer(config.model, config.chat_template),
        fingerprint=tokenizer_fingerprint(config.model, config.chat_template),
        known_labels=dict(configuration.id2label or {}) if config.task.endswith("classification") else {},
        max_length=_max_length(config, configuration),
        overlong=config.overlong,
        cache=cache_folder(),
    )
    return _encoded(config, encoder)


def _read_images(config: FinetuneConfig, configuration: Any) -> tuple[ImageChatStore, ImageChatStore | None]:
    reader = image_chat_reader(config.model, configuration, config.chat_template)
    most = _max_length(config, configuration)
    train, validation = (
        None
        if path is None
        else reader.read(path, folder=config.image_folder, max_length=most, overlong=config.overlong)
        for path in (config.data, config.validation)
    )
    assert train is not None
    return train, validation


def _encoded(config: FinetuneConfig, encoder: FileTokenizer) -> tuple[TokenStore | TokenStream, TokenStore | None]:
    """The samples to train on, and those never trained on."""
    if config.task == "embedding":
        validation = encode_pairs(encoder, config.validation) if config.validation else None
        return encode_pairs(encoder, config.data), validation
    train = TokenStream(encoder, config.data) if config.streaming else encode_file(encoder, config.data)
    return train, encode_file(encoder, config.validation, names=train.label_names) if config.validation else None


def _split_dropouts(config: FinetuneConfig, configuration: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The dropouts that are set to 0, and those that are drawn for each sample; none where the user allows any."""
    rates = dropout_rates(configuration)
    if "dropout" in config.train.allow:
        return {}, {}
    if not config.dropout or config.train.compile:
        return rates, {}
    off = {name: rate for name, rate in rates.items() if leaves_out_layers(name)}
    return off, {name: rate for name, rate in rates.items() if name not in off}


def _max_length(config: FinetuneConfig, configuration: Any) -> int | None:
    positions = num_positions(configuration)
    is_rotary = hasattr(configuration.get_text_config(), "rope_parameters")
    if config.max_length is not None and positions is not None and config.max_length > positions and not is_rotary:
        raise ConfigError(
            "max_length is more than the model has positions for",
            seen=f"max_length={config.max_length:,}, positions {positions:,}",
            do=f"give at most {positions:,}",
        )
    if config.max_length is None and config.task == "embedding":
        return longest_text(config, positions)
    return config.max_length or positions


def measure(ready: PreparedRun, samples: Sized) -> Measured:
    """Tokens and labels of the first samples, from the encoded arrays."""
    assert not isinstance(ready.train, TokenStream)  # it is measured a window at a time
    found = _measured(ready.train, ready.head, len(samples), f"{ready.content}-{len(samples)}")
    more = {BALANCE: found.lengths} if is_balanced(ready.configuration) else {}
    return replace(found, counts={**found.counts, **more})


def _measured(store: TokenStore | ImageChatStore, head: ModelHead, number: int, fingerprint: str) -> Measured:
    return Measured(
        lengths=store.columns["input_ids"].lengths()[:number],
        counts={head.loss.term: _label_counts(store, head)[:number]},
        costs={name: column[:number] for name, column in _costs(store).items()},
        found="tokens of the model's tokenizer",
        fingerprint=fingerprint,
    )


def _costs(train: TokenStore | ImageChatStore) -> dict[str, Ints]:
    return train.costs if isinstance(train, ImageChatStore) else {}


def _label_counts(train: TokenStore | ImageChatStore, head: ModelHead) -> Ints:
    column = train.columns.get("labels")
    if column is None:
        return np.ones(len(train), dtype=np.int64)
    is_counted = column.values != IGNORE
    if head.kind.name in ("causal_lm", "vision_language"):
        is_counted[column.starts[:-1]] = False  # The first token is predicted from nothing.
    sums = np.concatenate([[0], np.cumsum(is_counted)])
    counts: Ints = (sums[column.starts[1:]] - sums[column.starts[:-1]]).astype(np.int64)
    return counts


def _build_model(config: FinetuneConfig, ready: PreparedRun) -> nn.Module:
    model, new = _load(config, ready.configuration)
    if ready.keyed:
        key_dropout(model)
    if config.train.shard:
        first = ready.train.first() if isinstance(ready.train, TokenStream) else ready.train[0]
        HeadObjective(head=ready.head).look_into(model, ready.head.prepare(first))
    if new:
        ready.news[:] = [f"new weights, drawn from seed {config.train.seed}: {', '.join(new)}"]
    return model


def _load(config: FinetuneConfig, configuration: Any) -> tuple[nn.Module, list[str]]:
    """The model that is trained, its adapter included, and the names of its new weights."""
    bits = nf4_config(config.train.precision) if config.load_in_4bit else None
    model, new = load_weights(
        config.model, deepcopy(configuration), config.task, seed=config.train.seed, quantization=bits
    )
    if bits is not None:
        without_inference_kernels(model)
    _choose_trained(config, model)
    return model, new


def _choose_trained(config: FinetuneConfig, model: nn.Module) -> None:
    """Adapters, where they are asked for; of a model that reads images the tower frozen or not."""
    has_images = config.task == "vlm"
    if config.lora:
        more = {"targets": adapter_targets(model, with_tower=config.tower == "trained")} if has_images else {}
        add_lora(model, config.task, rank=config.lora_rank, alpha=config.lora_alpha, **more)
    elif has_images and config.tower == "frozen":
        freeze_tower(model)


def _restore_model(config: FinetuneConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model of a run; only that of a classifier needs the data, which names its classes."""
    if config.task in PAIRS:
        return restore_pair_model(config, weights)
    if config.task.endswith("classification"):
        return _build_model(config, prepare(config))
    return _load(config, load_configuration(config.model))[0]


def _sketch(config: FinetuneConfig, ready: PreparedRun) -> nn.Module:
    """The shapes of the model, without its weights."""
    model = sketch_model(deepcopy(ready.configuration), config.task)
    if ready.keyed:
        key_dropout(model)
    _choose_trained(config, model)
    return model


def _choose_layout(config: FinetuneConfig, model: nn.Module) -> tuple[Layout, str]:
    """Packed where it is proven right on this very model, else padded. One to be sharded stays on the host: it may not fit."""
    if torch.cuda.is_available() and not config.train.shard:
        model.to("cuda")
    with without_router_outputs(model):  # what their loss couples is taken over the whole step, in any layout
        choice = choose_layout(model)
    reasons = "; ".join(f"not {name}: {why}" for name, why in choice.reasons.items())
    if choice.layout not in ("packed", "padded"):
        raise ConfigError(
            "this model is right neither in padded nor in packed rows",
            seen=reasons,
            do="train it one sample at a time: --set train.true_batch=off",
        )
    layout: Layout = "packed" if choice.layout == "packed" else "padded"
    part: Any = language_model(model)
    words = [reasons, str(packing_plan_of(part)) if layout == "packed" else ""]
    why = "; ".join(word for word in words if word)
    return layout, f"layout: {layout}, proven equal to one by one" + (f" ({why})" if why else "")


def _other_layout(model: nn.Module) -> Layout | None:
    """Padded rows, where packed ones need modules that are called by group, which costs calls and copies."""
    part: Any = language_model(model)
    with without_router_outputs(model):
        return "padded" if not packing_plan_of(part).is_plain and is_proven(model, "padded") else None


def _describe(config: FinetuneConfig, ready: PreparedRun) -> list[str]:
    lines = [describe_embedding(ready.head, config, ready.configuration)] if config.task == "embedding" else []
    lines += [*ready.train.notes, *(ready.validation.notes if ready.validation is not None else ())]
    if ready.dropouts:
        rates = ", ".join(f"{name}={rate}" for name, rate in ready.dropouts.items())
        lines.append(f"dropout is set to 0 for training (was {rates}); --set train.allow=[dropout] keeps it")
    if ready.keyed:
        rates = ", ".join(f"{name}={rate}" for name, rate in ready.keyed.items())
        lines.append(f"dropout is drawn for each sample ({rates}); --set dropout=false trains without")
    return [*lines, *ready.news]


def _save(config: FinetuneConfig, ready: PreparedRun, model: nn.Module, folder: Path) -> None:
    """The model (or its adapter) and the tokenizer, as transformers loads them."""
    export_model(
        config, ready.configuration, model, folder, dropouts=ready.dropouts,
        with_configuration=bool(ready.train.label_names),
    )  # fmt: skip
    if isinstance(ready.train, ImageChatStore):
        ready.train.processor.save_pretrained(folder)
        return
    load_tokenizer(config.model, config.chat_template).save_pretrained(folder)
    if config.task == "embedding" and not (config.lora and not config.merge_lora):
        save_sentence_files(config, ready.configuration, folder)


def prepare_task(config: FinetuneConfig) -> Task:
    """The data file of a configuration, encoded, with the user's model and its loss."""
    if config.task in PAIRS:
        return prepare_preference(config)
    ready, is_embedding = prepare(config), config.task == "embedding"
    return Task(
        data=TrainData(samples=ready.samples, fields=ready.head.fields, validation=ready.held_out),
        measure=partial(measure, ready),
        build_model=partial(_build_model, config, ready),
        objective=_objective(config, ready),
        save=partial(_save, config, ready),
        commands=TaskCommands(
            describe=partial(_describe, config, ready),
            choose_layout=partial(_choose_layout, config),
            other_layout=_other_layout,
            can_compile=not config.load_in_4bit and not is_balanced(ready.configuration),
            sketch=None if config.load_in_4bit else partial(_sketch, config, ready),
            evaluate=None if is_embedding else partial(evaluate, config, ready.head, ready.train.label_names),
        ),
    )


def _objective(config: FinetuneConfig, ready: PreparedRun) -> Objective:
    if config.task == "embedding":
        return objective_for_pairs(ready.head, config, ready.configuration)
    own = HeadObjective(head=ready.head)
    if not is_balanced(ready.configuration):
        return own
    return balanced_objective(own, shape_of(ready.configuration, config.task), ready.configuration)


def _settle(config: FinetuneConfig) -> FinetuneConfig:
    """A name of the Hub becomes its folder in the cache, with the revision in it: a run goes on with what it began with."""
    return replace(config, model=fetch_model(config.model))


FINETUNING = System(
    name="hf",
    config_type=FinetuneConfig,
    prepare=prepare_task,
    settle=_settle,
    restore_model=_restore_model,
    generate=generate,
)
