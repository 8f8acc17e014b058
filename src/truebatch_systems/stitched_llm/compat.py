"""The interface of the original script: `StitchedModel`, `model.train(output_dir=...)` and its three lines at the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.errors import ConfigError
from truebatch.hf.pretrained import load_tokenizer
from truebatch.io.text_encoding import nearest
from truebatch.language.console import say
from truebatch.planning.rows import Layout
from truebatch.training.config import Precision
from truebatch_systems.stitched_llm.config import StitchConfig, StitchTrain
from truebatch_systems.stitched_llm.data.dataset import prepare_texts, sources_of
from truebatch_systems.stitched_llm.model.build import build
from truebatch_systems.stitched_llm.model.mask_check import refuse_wrong_masks
from truebatch_systems.stitched_llm.model.model import StitchedForCausalLM
from truebatch_systems.stitched_llm.model.save_load import save_adapter
from truebatch_systems.stitched_llm.train.hf_trainer import StitchedTrainer
from truebatch_systems.stitched_llm.train.trainable_parts import store_donors

_SETTLED = {"output_dir", "remove_unused_columns", "use_cpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoteTraining:
    """What `model.train(output_dir=...)` takes: names of TrainingArguments, defaults of the original script."""

    learning_rate: float = 1e-4
    per_device_train_batch_size: int = 1
    """Any number: the original script had to stay at 1."""
    gradient_accumulation_steps: int = 4
    num_train_epochs: float = 1.0
    max_steps: int = -1
    save_steps: int = 100
    logging_steps: int = 10
    gradient_checkpointing: bool = False
    """Only layers above the adapter are computed again; below it nothing is kept anyway."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    fp16: bool = False
    """Mixed precision in fp16, which needs a GPU. With neither fp16 nor bf16: what the machine has."""
    bf16: bool = False
    dataloader_num_workers: int = 4
    dataloader_pin_memory: bool = True
    dataloader_prefetch_factor: int = 2
    seed: int = 0
    deepspeed: str | None = None
    """A DeepSpeed configuration file (ZeRO 1 or 2)."""
    resume_from_checkpoint: bool = False
    """Go on after the newest checkpoint in output_dir."""
    layout: Layout = "packed"
    """Samples end to end, or one a row."""
    cells: int | None = None
    """Most cells of one forward pass: a token budget. It cuts a forward pass smaller, never changes the step."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other TrainingArguments, by their own names."""

    def __post_init__(self) -> None:
        if self.fp16 and self.bf16:
            raise ConfigError("one precision at a time", seen="fp16=True, bf16=True", do="leave one of them out")

    @classmethod
    def named(cls, settings: Mapping[str, Any]) -> NoteTraining:
        """From names of this class and of TrainingArguments; unknown ones are refused with the nearest."""
        own = {f.name for f in fields(cls)} - {"more"}
        others = {f.name for f in fields(TrainingArguments)} - own - _SETTLED
        for name in settings:
            if name in _SETTLED:
                raise ConfigError(
                    f"{name} is settled here", seen=f"{name}={settings[name]!r}", do="leave it out: truebatch collates"
                )
        _refuse_unknown(dict(settings), [*sorted(own), *sorted(others)], len(own))
        kept = {name: value for name, value in settings.items() if name in own}
        return cls(**kept, more={name: value for name, value in settings.items() if name in others})


class StitchedModel(StitchedForCausalLM):
    """A stitched model that trains itself the way the original script does."""

    stitch_settings: StitchConfig
    """Donors, cut, data."""

    @classmethod
    def from_donors(cls, bottom: str | Path | None = None, top: str | Path | None = None, **settings: Any) -> Any:
        """Donor folders, `data` and further settings of `StitchConfig`; without any, two tiny donors are made first.

        Precision: bf16 on a GPU that has it, else fp16 on a GPU, else fp32.
        """
        _refuse_unknown(settings, [f.name for f in fields(StitchConfig)])
        paths = {name: Path(value) for name, value in (("bottom", bottom), ("top", top)) if value is not None}
        given: dict[str, Any] = {
            name: Path(v) if name in _PATHS and v is not None else v for name, v in settings.items()
        }
        config = StitchConfig(**{**given, **paths}, train=StitchTrain(precision=_precision()))
        model = build(config).model
        model.__class__ = cls  # the same model with another face
        model.stitch_settings = config
        return model

    def train(self, mode: bool = True, *, output_dir: str | Path | None = None, **settings: Any) -> Any:
        """With `output_dir`, train into it and return the Trainer's result; without, what PyTorch means by train().

        Settings are those of `NoteTraining` and of TrainingArguments. `output_dir` then holds adapter and tokenizer.
        """
        if output_dir is None:
            if settings:
                raise ConfigError(
                    "training needs a folder", seen=f"train({', '.join(settings)})", do="give output_dir='./my_model'"
                )
            return super().train(mode)
        return _train(self, Path(output_dir), NoteTraining.named(settings))


_PATHS = ("data", "validation", "test", "vocabulary_map")


def _refuse_unknown(settings: dict[str, Any], known: list[str], shown: int | None = None) -> None:
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"there is no setting {name!r}{nearest(name, known)}",
                seen=f"{name}={settings[name]!r}",
                do=f"use one of: {', '.join(known[:shown])}",
            )


def _precision() -> Precision:
    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _train(model: StitchedModel, folder: Path, asked: NoteTraining) -> Any:
    precision = precision_of(asked, model.stitch_settings.train.precision, has_gpu=torch.cuda.is_available())
    if precision != model.stitch_settings.train.precision:
        _store_again(model, precision)
    config = model.stitch_settings
    for line in starting_lines(asked, precision):
        say(line)
    refuse_wrong_masks(model)
    tokenizer = load_tokenizer(sources_of(config).tokenizer, None)
    trainer = StitchedTrainer(
        model=model,
        args=training_arguments(folder, asked, config.train.precision),
        train_dataset=prepare_texts(config).samples,
        processing_class=tokenizer,
        data_collator=_as_it_is,
        truebatch=AdapterConfig(layout=asked.layout, cells=asked.cells),
    )
    result = trainer.train(resume_from_checkpoint=asked.resume_from_checkpoint or None)
    save_adapter(model, folder)
    tokenizer.save_pretrained(folder)
    return result


def precision_of(asked: NoteTraining, found: Precision, *, has_gpu: bool) -> Precision:
    """What is asked for, where the machine has it: fp16 is no precision of a CPU; else what the model was built with."""
    if asked.bf16:
        return "bf16"
    return "fp16" if asked.fp16 and has_gpu else found


def _store_again(model: StitchedModel, precision: Precision) -> None:
    """Donors in another precision than they were loaded in; trained parts stay fp32."""
    config = model.stitch_settings
    if config.stored == "int8":
        raise ConfigError(
            "int8 donors keep the precision they were built with",
            seen=f"{precision} asked for, built in {config.train.precision}",
            do="leave fp16 and bf16 out, or build the model with another `stored`",
        )
    model.stitch_settings = replace(config, train=replace(config.train, precision=precision))
    store_donors(model, config.stored, precision)


def _as_it_is(samples: list[Any]) -> dict[str, torch.Tensor]:
    """One sample as a row of one: truebatch collates."""
    return {name: torch.as_tensor(value)[None] for name, value in samples[0].items()}


def training_arguments(folder: Path, asked: NoteTraining, precision: Precision) -> TrainingArguments:
    """The original script's TrainingArguments."""
    own = {"resume_from_checkpoint", "layout", "cells", "dataloader_prefetch_factor", "fp16", "bf16", "more"}
    given = {name: value for name, value in asdict(asked).items() if name not in own}
    return TrainingArguments(
        output_dir=str(folder),
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        # torch refuses a prefetch factor without workers.
        dataloader_prefetch_factor=asked.dataloader_prefetch_factor if asked.dataloader_num_workers else None,
        remove_unused_columns=False,
        **{
            "report_to": [],
            **given,
            "dataloader_pin_memory": asked.dataloader_pin_memory and torch.cuda.is_available(),
            **asked.more,
        },
    )


def starting_lines(asked: NoteTraining, precision: Precision) -> list[str]:
    """The three lines that the original script prints first."""
    batch, steps = asked.per_device_train_batch_size, asked.gradient_accumulation_steps
    workers = asked.dataloader_num_workers
    loading = (
        f"{workers} workers in parallel, each prefetching {asked.dataloader_prefetch_factor} batches"
        if workers
        else "main process"
    )
    is_lost = asked.fp16 and precision == "fp32"
    exact = (
        "off (FP32): fp16=True needs a GPU"
        if is_lost
        else {"fp16": "FP16 (for a Tesla T4)", "bf16": "BF16", "fp32": "off (FP32)"}[precision]
    )
    return [
        f"✅ effective batch_size: {batch} × {steps} (gradient_accumulation) = {batch * steps}",
        f"✅ data loading: {loading}",
        f"✅ mixed precision: {exact}",
    ]
